"""The page at `/`: a prompt, and its canvas while it is denoised. One file, without other assets."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse

# Nothing is loaded from anywhere, and only this server is called.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_page(app: FastAPI) -> None:
    """Serve the page. It needs no key itself; its requests send the one that is typed in."""
    folder = files("canvasrt.containers.openai") / "assets"
    page = (folder / "index.html").read_text("utf-8")
    for mark, name in (("/*STYLE*/", "style.css"), ("/*SCRIPT*/", "page.js")):
        page = page.replace(mark, (folder / name).read_text("utf-8"))

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page, headers=_HEADERS)
