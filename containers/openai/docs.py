"""`/openapi.json`, and `/docs`: the same as a page without scripts or other assets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from html import escape
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, JSONResponse

from canvasrt.containers.openai.document import document, fields, shown

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, td:first-child { font-family: ui-monospace, monospace; white-space: nowrap; }
summary { cursor: pointer; padding: .4rem 0; border-top: 1px solid #8886; }
summary code { font-weight: 600; }
details, h3 + table { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0 1rem; }
td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; }
td + td { overflow-wrap: anywhere; min-width: 8rem; }
"""


def add_docs(app: FastAPI, needs_key: bool) -> None:
    """Serve both. They are made when they are first asked for, and need no key."""

    @cache
    def made() -> dict[str, Any]:
        return document(needs_key)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JSONResponse(made())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(page(made()), headers=_HEADERS)


def page(found: Mapping[str, Any]) -> str:
    """Return a document as HTML."""
    info, schemas = found["info"], found["components"]["schemas"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        "<meta name=viewport content='width=device-width'>",
        f"<style>{_STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['description'])} <a href='/openapi.json'>OpenAPI</a>, <a href='/'>page</a>",
    ]
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            parts.append(_operation(method, path, operation, schemas))
    named = [name for name in schemas if not name.endswith(("Request", "Error"))]
    for name in named:
        parts += [f"<h3>{escape(name.strip('_'))}</h3>", _table(schemas[name], schemas)]
    return "\n".join(parts) + "</html>"


def _operation(
    method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]
) -> str:
    parts = [
        f"<details><summary><code>{method.upper()} {escape(path)}</code> "
        f"{escape(operation['summary'])}</summary>"
    ]
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        parts += ["<h4>Request</h4>", _table(schema, schemas)]
    for status, response in operation["responses"].items():
        kinds = ", ".join(response["content"])
        parts.append(f"<p><b>{status}</b> {escape(response['description'])} <i>{kinds}</i></p>")
        if status == "200":
            parts.append(_table(next(iter(response["content"].values()))["schema"], schemas))
    return "\n".join(parts) + "</details>"


def _table(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td>{escape(name)}{' *' if required else ''}<td>{escape(kind)}<td>{escape(about)}"
        for name, kind, required, about in fields(dict(schema), schemas)
    ]
    if not rows:
        return f"<p>{escape(shown(dict(schema), schemas))}</p>"
    return "<table>" + "\n".join(rows) + "</table>"
