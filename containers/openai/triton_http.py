"""A proxy for callers of Triton's HTTP server, which itself listens on a Unix socket.

The proxy checks API keys, and checks origins because web pages can reach loopback. It refuses bodies that would crash
Triton: a million nested brackets, a shape of 2**93 elements, or a classification of text. It forwards all other
requests, and their replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import secrets
from dataclasses import replace
from typing import Any

import h11
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from canvasrt.containers.openai.auth import Keys, name_of
from canvasrt.containers.openai.body_pool import BodyPool
from canvasrt.containers.openai.connections import Places
from canvasrt.containers.openai.errors import ApiError, bad_request, unavailable
from canvasrt.containers.openai.health import ServerState
from canvasrt.containers.openai.metrics import FrontMetrics
from canvasrt.containers.openai.middleware import AT_END, Middleware
from canvasrt.containers.openai.options import FrontSettings
from canvasrt.containers.openai.origin import Origin
from canvasrt.containers.openai.streaming import Disconnected, unless_disconnected
from canvasrt.containers.tensors import CANCEL_PARAMETER, OWNER, STREAM_MODEL
from canvasrt.containers.untrusted import check_json

# Headers that concern a single connection and are not forwarded. For Triton, `_head` sets some of them again.
_HOP = {
    b"connection",
    b"expect",
    b"host",
    b"keep-alive",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
_JSON_BYTES = b"inference-header-content-length"
# Only on this path can binary data follow the JSON in the body.
_INFER = re.compile(rb"/v2/models/[\w.-]+(/versions/\d+)?/infer")
# On this path, Triton reads parameters from unknown JSON fields; on the path above, from headers.
_GENERATE = re.compile(rb"/v2/models/[\w.-]+(/versions/\d+)?/generate(_stream)?")
_READ = 65536
_DIMENSIONS = 8  # maximum number of a tensor's dimensions; the models' tensors have one dimension
_METHODS = ("GET", "POST")  # Triton supports no other methods
# The path of cancellations, and the seconds until a cancellation is repeated.
_CANCEL_PATH, _CANCEL_AGAIN = f"/v2/models/{STREAM_MODEL}/generate_stream", 0.25


def make_triton_app(settings: FrontSettings, state: ServerState, places: Places) -> ASGIApp:
    """Return the application for Triton's HTTP port."""
    options = settings.options
    guard = _Guard(Keys(options.keys), state, settings)
    origin = Origin(replace(options, host=settings.triton_host))
    return Middleware(guard, state, FrontMetrics(), options.max_body, places, origin)


class _Guard:
    def __init__(self, keys: Keys, state: ServerState, settings: FrontSettings) -> None:
        self._keys, self._state = keys, state
        self._path, self._secret = settings.triton_path, settings.caller_secret.encode()
        self._pool = BodyPool()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if scope["method"] not in _METHODS:
            raise ApiError(405, "The method is not allowed.", code="method_not_allowed")
        caller = self._keys.check(request.headers)
        refusal = self._state.refusal()
        if scope["method"] == "POST":
            if refusal is not None:
                raise refusal
            scope[AT_END].enter_context(self._state.callers.one(caller))
        body = await request.body()
        call = secrets.token_hex(16)
        owner = self._secret + f"{name_of(caller)}/{call}".encode()
        if _GENERATE.fullmatch(scope["raw_path"]):
            body = _with_owner(body, owner)
        head, json_bytes = _head(scope, len(body), owner)
        try:
            await self._pool.run(json_bytes, _check, body[:json_bytes], len(body))
        except ValueError as error:
            raise bad_request(f"The body cannot be read: {error}.") from None
        exchange = asyncio.ensure_future(_exchange(self._path, head, body, send))
        try:
            await unless_disconnected(receive, _shielded(exchange))
        except (OSError, h11.RemoteProtocolError):
            raise refusal or unavailable("Triton does not answer.", "model_not_ready") from None
        except Disconnected:
            # Triton would finish the request although its caller has left.
            while not exchange.done():
                await self._cancel(call)
                await asyncio.wait([exchange], timeout=_CANCEL_AGAIN)
            exchange.exception()
            raise

    async def _cancel(self, call: str) -> None:
        """Ask the model to cancel a call. This has no effect if the model has not received the call yet."""
        body = json.dumps({CANCEL_PARAMETER: call}).encode()
        headers = [
            ("host", "localhost"),
            ("connection", "close"),
            ("content-length", str(len(body))),
        ]
        head = h11.Request(method="POST", target=_CANCEL_PATH, headers=headers)
        with contextlib.suppress(OSError, h11.RemoteProtocolError):
            await _exchange(self._path, head, body, _nowhere)


async def _shielded(exchange: asyncio.Future[None]) -> None:
    await asyncio.shield(exchange)


async def _nowhere(message: Message) -> None:
    """Discard a message."""


def _check(text: bytes, size: int) -> None:
    """Raise ValueError for JSON that would crash Triton: too many values or brackets; a tensor with more elements than
    the body's `size` in bytes, for which Triton would allocate memory; or a classification, in which Triton would
    divide by the size of the text type, 0."""

    # `json.loads` calls this with the members of every object. If a name occurs twice, Triton reads the first value,
    # but a dict would keep only the last one.
    def check(pairs: list[tuple[str, Any]]) -> None:
        for name, value in pairs:
            if name == "shape" and not (isinstance(value, list) and _count(value) <= size):
                raise ValueError("it has a shape with more elements than the body has bytes")
            if name == "classification":
                raise ValueError(
                    "it asks for a classification, but the outputs cannot be classified"
                )

    check_json(text)
    if text.strip():
        json.loads(text.decode(), object_pairs_hook=check)


def _count(shape: list[Any]) -> float:
    """Return the number of elements of a tensor; infinity for an invalid shape."""
    if len(shape) > _DIMENSIONS or not all(type(each) is int and each >= 0 for each in shape):
        return math.inf
    return math.prod(max(each, 1) for each in shape)


def _with_owner(body: bytes, owner: bytes) -> bytes:
    """Insert the caller's name at the start of a JSON object; return any other body unchanged. A name that the caller
    wrote into the JSON lacks the secret, so no model would accept it."""
    if not (text := body.lstrip(b" \t\r\n")).startswith(b"{"):
        return body
    fields = text[1:].lstrip(b" \t\r\n")
    comma = b"" if fields.startswith(b"}") else b","
    return b'{"%s":"%s"%s%s' % (OWNER.encode(), owner, comma, fields)


def _head(scope: Scope, size: int, owner: bytes) -> tuple[h11.Request, int]:
    """Return the request line and headers for Triton, and how many bytes of the body are JSON. `owner` is the caller's
    name."""
    headers = {name: value for name, value in scope["headers"] if name not in _HOP}
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise ApiError(415, "Send the body uncompressed.", code="unsupported_media_type")
    json_bytes = size
    if (given := headers.pop(_JSON_BYTES, None)) is not None and _INFER.fullmatch(
        scope["raw_path"]
    ):
        if not given.isdigit() or len(given) > 9 or int(given) > size:
            raise bad_request(
                "Inference-Header-Content-Length must be a number of at most the body's length."
            )
        json_bytes = int(given)
        headers[_JSON_BYTES] = given
    headers |= {b"host": b"localhost", b"connection": b"close", OWNER.encode(): owner}
    if size or scope["method"] == "POST":
        headers[b"content-length"] = str(size).encode()
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    try:
        return h11.Request(
            method=scope["method"], target=target, headers=[*headers.items()]
        ), json_bytes
    except h11.LocalProtocolError:
        raise bad_request("The request's target or headers are malformed.") from None


async def _exchange(path: str, head: h11.Request, body: bytes, send: Send) -> None:
    """Send one request to Triton, and stream the reply to the caller."""
    upstream = h11.Connection(h11.CLIENT)
    reader, writer = await asyncio.open_unix_connection(path)
    with contextlib.closing(writer):
        for sent in (head, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(upstream.send(sent) or b"")
        await writer.drain()
        while True:
            event = upstream.next_event()
            if event is h11.NEED_DATA:
                upstream.receive_data(await reader.read(_READ))
            elif isinstance(event, h11.Response):
                kept = [(name, value) for name, value in event.headers if name not in _HOP]
                start = {"type": "http.response.start", "status": event.status_code}
                await send({**start, "headers": kept})
            elif isinstance(event, h11.Data):
                data = bytes(event.data)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
