"""`/docs`: every request of the API on one page, made from the OpenAPI document, without a script or another host."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from fastapi import Request
from starlette.responses import HTMLResponse

from service.api.access import RULES
from service.api.responses import Router

router = Router(include_in_schema=False)

_STYLE: Final = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 13px; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid #8886; border-radius: 4px; }
section { border-top: 1px solid #8886; padding: .8rem 0; }
h2 { margin-top: 2rem; } h3 { margin: 0; font-size: 15px; } p { margin: .3rem 0; }
td { padding: .1rem 1rem .1rem 0; vertical-align: top; } .scope { float: right; opacity: .8; }
"""
_HEADERS: Final = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            f"style-src 'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "Cache-Control": "no-cache",
}


@router.get("/docs")
def read_reference(request: Request) -> HTMLResponse:
    return HTMLResponse(render(request.app.openapi()), headers=_HEADERS)


def render(document: Mapping[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    title = escape(f"{document['info']['title']} {document['info']['version']}: requests")
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["other"])[0]
            by_tag.setdefault(tag, []).append("".join(_operation(method.upper(), path, operation)))
    sections = "".join(f"<h2>{escape(tag)}</h2>{''.join(found)}" for tag, found in by_tag.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'</head><body><h1>{title}</h1><p>The whole of it, with every type: <a href="/openapi.json">/openapi.json</a>. '
        "The word at the right is the scope of the token that a request takes where tokens are needed.</p>"
        f"{sections}</body></html>"
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    rule = RULES.get(f"{method} {path}") or next(
        rule for key, rule in RULES.items() if key.replace(":path}", "}") == f"{method} {path}"
    )
    scope = "" if rule.scope is None else f'<span class="scope">{rule.scope}</span>'
    yield f"<section>{scope}<h3><code>{method} {escape(path)}</code></h3><p>{escape(operation.get('summary', ''))}</p>"
    if operation.get("description"):
        yield f"<p>{escape(operation['description'])}</p>"
    if operation.get("parameters"):
        rows = "".join(
            f"<tr><td><code>{escape(each['name'])}</code></td><td>{escape(each['in'])}</td>"
            f"<td>{escape(each.get('description', ''))}</td></tr>"
            for each in operation["parameters"]
        )
        yield f"<table>{rows}</table>"
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = content.get("schema", {})
        name = str(schema.get("$ref", "")).rpartition("/")[2] or schema.get("title") or schema.get("type", "")
        yield f"<p>Body: <code>{escape(media_type)}</code> {escape(name)}</p>"
        for example in schema.get("examples", [])[:1]:
            yield f"<pre>{escape(json.dumps(example, indent=2))}</pre>"
    yield "</section>"
