"""Serves the built dashboard under /ui/: files as they are, every other path as the one page that routes itself."""

from importlib import resources
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from service.errors import NotFound

router = APIRouter(prefix="/ui", include_in_schema=False)

_CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        # The charts and tables place themselves with inline styles; scripts stay forbidden inline.
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
_ABSENT: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Muonscope</title></head>
<body>
<h1>The dashboard is not built</h1>
<p>The service works: <a href="/runs">/runs</a>, <a href="/openapi.json">/openapi.json</a> and the
<code>muonscope</code> command answer.</p>
<p>From a source checkout, <code>pip install .</code> builds the dashboard; packages contain it.</p>
</body></html>
"""


def static_folder() -> Path:
    return Path(str(resources.files("service.dashboard"))) / "static"


@router.get("/", response_class=Response)
@router.get("/{path:path}", response_class=Response)
async def serve(path: str = "") -> Response:
    """Return the file at `path`, or the page itself for a path of the page's own router."""
    folder = static_folder().resolve()
    index = folder / "index.html"
    if not index.is_file():
        return _guarded(HTMLResponse(_ABSENT, status_code=503), cache="no-store")
    if "\x00" in path:
        raise NotFound("there is no such file", field="path", value=path)
    file = (folder / path).resolve()
    if path and file.is_relative_to(folder) and file.is_file():
        return _guarded(FileResponse(file), cache="no-cache")
    if Path(path).suffix:
        # A missing script answered with HTML would only fail later and darker.
        raise NotFound(f"there is no file {path[:200]}", field="path", value=path, remedy="rebuild the dashboard")
    return _guarded(FileResponse(index), cache="no-cache")


def _guarded(response: Response, *, cache: str) -> Response:
    response.headers["Content-Security-Policy"] = _CONTENT_SECURITY_POLICY
    response.headers["Cache-Control"] = cache
    return response


home = APIRouter(include_in_schema=False)


@home.get("/")
async def to_dashboard() -> RedirectResponse:
    return RedirectResponse("/ui/runs", status_code=307)
