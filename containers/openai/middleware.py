"""Handles what all requests share: ids, body limits, the access log, metrics, and unexpected errors."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from contextlib import ExitStack
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from canvasrt.containers.openai.connections import Places
from canvasrt.containers.openai.errors import ApiError, too_late, unavailable
from canvasrt.containers.openai.health import HEALTH, QUIET, ServerState
from canvasrt.containers.openai.metrics import FrontMetrics
from canvasrt.containers.openai.origin import Origin
from canvasrt.containers.openai.streaming import Disconnected
from canvasrt.containers.tensors import ARRIVED, OWNER

log = logging.getLogger("canvasrt.openai.access")
ID = "canvasrt.request_id"  # in a request's scope: the request's id
DISCONNECTED = 499  # status of a request whose caller disconnected, as in nginx
CALLER = "canvasrt.caller"  # in a request's scope: the name that identifies the caller's key
MORE = "canvasrt.more"  # in a request's scope: a function that counts more answers against the caller's limit
BEGIN = "canvasrt.begin"  # in a request's scope: when the request's body was complete, in monotonic seconds
AT_END = "canvasrt.at_end"  # in a request's scope: an ExitStack that is closed after the response
_ID = re.compile(rb"[\w.:/+=@-]{1,128}", re.ASCII)
# Seconds added to the timeout here, so that the code that calls the model reports the timeout first.
_GRACE = 1.5


class Middleware:
    """Wraps the application. `max_body` is in bytes; `timeout` is in seconds from the end of the body to the start of
    the answer. Callers in `places.reserved` only get health routes."""

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        metrics: FrontMetrics,
        max_body: int,
        places: Places | None = None,
        origin: Origin | None = None,
        timeout: float | None = None,
    ) -> None:
        self._app, self._state, self._metrics = app, state, metrics
        self.max_body, self.places = max_body, places or Places(0)
        self.origin, self.timeout = origin, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # handled as GET; uvicorn drops the response body
            scope = {**scope, "method": "GET"}
        exchange = _Exchange(self, scope, receive, send)
        begin = time.perf_counter()
        try:
            with ExitStack() as scope[AT_END]:
                if scope["method"] == "POST":
                    scope[AT_END].enter_context(self._state.working())
                await exchange.run(self._app)
        finally:
            self._report(scope, exchange, time.perf_counter() - begin)

    def _report(self, scope: Scope, exchange: _Exchange, seconds: float) -> None:
        route = scope.get("route")
        endpoint = getattr(route, "path", "other")
        self._metrics.requests[endpoint, exchange.status] += 1
        if scope["method"] == "POST":
            self._metrics.seconds[endpoint].add(seconds)
        quiet = scope["path"] in QUIET and exchange.status < 400
        log.log(
            logging.DEBUG if quiet else logging.INFO,
            "%s %s %d %.0f ms %s",
            scope["method"],
            # Escaped, so that a path cannot forge log lines.
            scope["path"].encode("unicode_escape").decode()[:200],
            exchange.status,
            seconds * 1000,
            exchange.id,
        )


class _Exchange:
    """One request and its response."""

    def __init__(self, limits: Middleware, scope: Scope, receive: Receive, send: Send) -> None:
        self.id = _given_id(scope) or f"req_{uuid.uuid4().hex}"
        self.status = DISCONNECTED
        scope[ID] = self.id
        self._scope, self._receive, self._send = scope, receive, send
        self._limits, self._left = limits, limits.max_body
        self._started = self._ended = False
        self._timer: asyncio.Timeout | None = None

    async def run(self, app: ASGIApp) -> None:
        try:
            self._check()
            await self._answer(app)
            if not self._ended:
                self.status = DISCONNECTED
        except (Disconnected, ClientDisconnect):
            self.status = DISCONNECTED
        except ApiError as error:
            await self._fail(error.response(self._scope["path"]))
        except Exception:
            logging.getLogger(__name__).exception("request %s failed", self.id)
            await self._fail(internal_error(self.id, self._scope["path"]))

    async def _answer(self, app: ASGIApp) -> None:
        """Run the application, and raise ApiError 504 when the timeout expires before the answer starts."""
        try:
            async with asyncio.timeout(None) as self._timer:
                await app(self._scope, self.receive, self.send)
        except TimeoutError:
            if self._timer is None or not self._timer.expired():
                raise
            raise too_late(self._limits.timeout or 0) from None
        finally:
            self._timer = None

    def _limit(self, end: float | None) -> None:
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(end)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise self._too_large()
            if not message.get("more_body", False):
                self._scope[BEGIN] = begin = time.monotonic()
                if (timeout := self._limits.timeout) is not None:
                    self._limit(begin + timeout + _GRACE)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._limit(None)
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.id.encode())]
        await self._send(message)
        if message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)

    async def _fail(self, response: Response) -> None:
        if not self._started:
            await response(self._scope, self._receive, self.send)

    def _check(self) -> None:
        """Raise ApiError for a request that must not reach the application."""
        scope, limits = self._scope, self._limits
        if scope.get("client") in limits.places.reserved and scope["path"] not in HEALTH:
            error = unavailable("Too many connections are open.", "too_many_connections")
            error.headers["Connection"] = "close"
            raise error
        if limits.origin is not None:
            limits.origin.check(scope)
        headers: dict[bytes, Any] = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limits.max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body of the request is larger than {self._limits.max_body} bytes.",
            code="request_too_large",
        )


def parameters_of(request: Request) -> dict[str, int | str]:
    """Return a request's parameters for the models: the caller's name and the arrival time."""
    begin = request.scope.get(BEGIN, time.monotonic())
    return {OWNER: str(request.scope.get(CALLER, "")), ARRIVED: int(begin * 1e6)}


def _given_id(scope: Scope) -> str:
    """Return the request id that the caller sent; empty if there is none, or if the id is not safe to log."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if _ID.fullmatch(given) else ""


def internal_error(id: str, path: str) -> Response:
    """Return the reply to a request that failed unexpectedly. The log has the details, under the request's id."""
    message = f"Internal error; the request's id is {id}."
    return ApiError(500, message, code="internal_error").response(path)
