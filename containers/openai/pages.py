"""Serves `/docs`, `/openapi.json` and `/`, which is a page that shows canvases while they are denoised."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, JSONResponse

from canvasrt.types import Json

# The page loads nothing from other servers, and only calls this one.
_SEALED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src 'unsafe-inline'"
_HEADERS = {
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_REF = "#/components/schemas/"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, td:first-child { font-family: ui-monospace, monospace; white-space: nowrap; }
summary { cursor: pointer; padding: .4rem 0; border-top: 1px solid #8886; }
details, h3 + table { overflow-x: auto; }
td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; }
td + td { overflow-wrap: anywhere; min-width: 8rem; }
"""


def add_pages(app: FastAPI, needs_key: bool) -> None:
    """Add the three routes. They need no API key; the page sends the key that its user enters."""
    folder = files("canvasrt.containers.openai") / "assets"
    page = (folder / "index.html").read_text("utf-8")
    for mark, name in (("/*STYLE*/", "style.css"), ("/*SCRIPT*/", "page.js")):
        page = page.replace(mark, (folder / name).read_text("utf-8"))
    allowed = "; script-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:"

    @cache
    def described() -> Json:
        return document(app, needs_key)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        policy = {"Content-Security-Policy": _SEALED + allowed}
        return HTMLResponse(page, headers=_HEADERS | policy)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(described())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        headers = _HEADERS | {"Content-Security-Policy": _SEALED}
        return HTMLResponse(docs_page(described()), headers=headers)


def document(app: FastAPI, needs_key: bool) -> Json:
    """Return FastAPI's OpenAPI document without FastAPI's own validation errors, which this server never returns. If
    `needs_key`, mark the operations that need an API key."""
    found = app.openapi()
    schemas = found["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for methods in found["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            if needs_key and "401" in operation["responses"]:
                operation["security"] = [{"key": []}]
    if needs_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return found


def docs_page(found: Json) -> str:
    """Return an OpenAPI document as HTML. It has no scripts; FastAPI's own page loads scripts from another server."""
    info, schemas = found["info"], found["components"]["schemas"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        "<meta name=viewport content='width=device-width'>",
        f"<style>{_STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['description'])} <a href='/openapi.json'>OpenAPI</a>, <a href='/'>page</a>",
    ]
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            title = f"<code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
            parts.append(f"<details><summary>{title}</summary>")
            if "requestBody" in operation:
                parts += ["<h4>Request</h4>", _table(operation["requestBody"], schemas)]
            for status, response in operation["responses"].items():
                parts.append(f"<p><b>{status}</b> {escape(response['description'])}</p>")
                if status == "200":
                    parts.append(_table(response, schemas))
            parts.append("</details>")
    for name in schemas:
        if not name.endswith(("Request", "Error", "ErrorReply")):
            parts += [f"<h3>{escape(name.strip('_'))}</h3>", _fields(schemas[name])]
    return "\n".join(parts) + "</html>"


def _table(of: Json, schemas: Mapping[str, Json]) -> str:
    """Return an HTML table of the fields of a body or a reply."""
    schema = next(iter(of["content"].values()))["schema"]
    return _fields(schemas.get(schema.get("$ref", "").removeprefix(_REF), schema))


def _fields(schema: Json) -> str:
    required = schema.get("required", ())
    given = schema.get("properties", {}).items()
    rows = [
        f"<tr><td>{escape(name)}{' *' if name in required else ''}<td>{escape(_kind(each))}"
        f"<td>{escape(_about(each))}"
        for name, each in sorted(given, key=lambda field: field[0] not in required)
    ]
    return "<table>" + "\n".join(rows) + "</table>" if rows else f"<p>{escape(_kind(schema))}</p>"


def _about(schema: Json) -> str:
    inside = (each.get("description", "") for each in schema.get("anyOf", ()))
    return str(schema.get("description") or next(filter(None, inside), ""))


def _kind(schema: Json) -> str:
    """Return a schema's type in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].removeprefix(_REF).strip("_"))
    if "enum" in schema:
        return " or ".join("null" if each is None else repr(each) for each in schema["enum"])
    if "anyOf" in schema:
        kinds = dict.fromkeys(_kind(each) for each in schema["anyOf"])
        return " or ".join(kind for kind in kinds if kind != "null")
    if "const" in schema:
        return repr(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    kind, low, high = str(schema.get("type", "any")), schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{kind} from {low} to {high}"
    if "exclusiveMinimum" in schema:
        return f"{kind} above {schema['exclusiveMinimum']}"
    return f"{kind} of at least {low}" if low is not None else kind
