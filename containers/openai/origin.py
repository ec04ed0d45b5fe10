"""Decides which web pages can call the server: those of the allowed origins (CORS).

If a server on loopback needs no API keys, any web page that a user opens could post to it. Two checks prevent that.
A page's post must be JSON, because browsers let only pages of allowed origins post JSON. And Host must be an allowed
name, because a page can make its own host name resolve to loopback. Clients that are not browsers can omit the content
type; their requests have neither Origin nor Sec-Fetch-Site.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from canvasrt.containers.names import LOOPBACK
from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.health import HEALTH
from canvasrt.containers.openai.options import FrontOptions


class Origin:
    """Checks requests to a server without API keys. If the server has keys, no check is needed, because foreign web
    pages do not know the keys."""

    def __init__(self, options: FrontOptions) -> None:
        hosts = options.hosts or (LOOPBACK if options.host in LOOPBACK else ())
        self._hosts = set() if "*" in hosts else {each.lower() for each in hosts}
        self._keyless = not options.keys

    def check(self, scope: Scope) -> None:
        """Raise ApiError 403 for a Host that is not allowed, and 415 for a web page's post that is not JSON."""
        if not self._keyless or scope["path"] in HEALTH:
            return
        headers = dict(scope["headers"])
        if self._hosts and (host := _host(headers)) not in self._hosts:
            raise ApiError(
                403,
                f"This server does not answer to the host {host!r}; see --allowed-hosts.",
                code="host_not_allowed",
            )
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        page = b"origin" in headers or b"sec-fetch-site" in headers
        if scope["method"] == "POST" and page and kind != b"application/json":
            raise ApiError(
                415,
                "Send the body as JSON, with Content-Type: application/json.",
                code="unsupported_media_type",
            )


def with_cors(app: ASGIApp, options: FrontOptions) -> ASGIApp:
    """Return the application with headers that let pages of the allowed origins read its replies (CORS)."""
    if not options.origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=options.origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
    )


def _host(headers: Mapping[bytes, bytes]) -> str:
    """Return the Host header without its port, in lower case."""
    text = headers.get(b"host", b"").decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if text.rpartition(":")[2].isdecimal() and ":" in text else text
