"""Serves the built dashboard under /ui/: its files, and every other path as the one page that routes itself.

Names below assets/ carry a hash of their content and may be kept for ever; the page itself is asked for each time.
Where the build left a compressed twin beside a file, a browser that accepts gzip gets that.
"""

from importlib import resources
from mimetypes import guess_type
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
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
_FOR_EVER: Final = "public, max-age=31536000, immutable"
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
async def serve(request: Request, path: str = "") -> Response:
    """Return the file at `path`, or the page itself for a path of the page's own router."""
    folder = static_folder().resolve()
    index = folder / "index.html"
    if not index.is_file():
        return _guarded(HTMLResponse(_ABSENT, status_code=503), cache="no-store")
    if "\x00" in path:
        raise NotFound("there is no such file", field="path", value=path)
    file = (folder / path).resolve()
    if path and file.is_relative_to(folder) and file.is_file():
        is_hashed = file.is_relative_to(folder / "assets")
        return _guarded(_file(file, request), cache=_FOR_EVER if is_hashed else "no-cache")
    if Path(path).suffix:
        # A missing script answered with HTML would only fail later and darker.
        raise NotFound(f"there is no file {path[:200]}", field="path", value=path, remedy="rebuild the dashboard")
    return _guarded(_file(index, request), cache="no-cache")


def _file(file: Path, request: Request) -> FileResponse:
    packed = file.with_name(f"{file.name}.gz")
    if "gzip" not in request.headers.get("accept-encoding", "") or not packed.is_file():
        return FileResponse(file, headers={"Vary": "Accept-Encoding"})
    headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return FileResponse(packed, media_type=guess_type(file.name)[0], headers=headers)


def _guarded(response: Response, *, cache: str) -> Response:
    response.headers["Content-Security-Policy"] = _CONTENT_SECURITY_POLICY
    response.headers["Cache-Control"] = cache
    return response


home = APIRouter(include_in_schema=False)


@home.get("/")
async def to_dashboard() -> RedirectResponse:
    return RedirectResponse("/ui/runs", status_code=307)
