"""Sends requests to OpenAI-compatible servers, and waits for servers that are down."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from canvasrt.containers.batch.lines import Line
from canvasrt.containers.batch.run import Reply
from canvasrt.containers.client.openai import KEY_VARIABLE, PORT_HINT, address
from canvasrt.containers.untrusted import load_json
from canvasrt.errors import CanvasError
from canvasrt.extras import require

_FIRST_REST, _LONGEST_REST = 0.5, 30.0  # pauses for a server that is down, in seconds
PATIENCE = 600.0  # seconds after which a batch fails if all servers are down
MOST_REPLY = 64 * 2**20  # maximum size of a reply, in bytes
_log = logging.getLogger(__name__)
# Replies of Triton's HTTP API and of its metrics server.
_TRITON_REPLIES = ({"error": "Not Found"}, {"error": "Method Not Allowed"})
_SHOWN = 200  # maximum characters to show of a server's message


class _NoAnswerError(Exception):
    """A reply that contains no answer although its status is 200, or that is too long."""


@dataclass
class _Server:
    """A server. `root` is its address without /v1; times are from `time.monotonic`."""

    root: str
    in_flight: int = 0
    down_since: float | None = None
    rests_until: float = 0.0
    rest: float = _FIRST_REST
    has_told_busy: bool = False

    def up(self) -> None:
        """Record that the server has answered."""
        self.down_since, self.rest = None, _FIRST_REST

    def down(self, now: float, least: float, why: str) -> None:
        """Pause requests to the server, for at least `least` seconds. Pauses double until the server answers."""
        if now >= self.rests_until:  # otherwise another request has already noted the failure
            if self.down_since is None:
                self.down_since = now
                _log.warning(
                    "%s is down; requests to it are retried later: %s",
                    self.root,
                    why.partition("\n")[0],
                )
            self.rests_until = now + max(self.rest, least)
            self.rest = min(2 * self.rest, _LONGEST_REST)

    def busy(self, why: str) -> None:
        """Warn, only once, that the server has too many requests and refuses more."""
        if not self.has_told_busy:
            _log.warning(
                "%s is busy; the requests that it refused are retried: %s",
                self.root,
                why.partition("\n")[0],
            )
        self.has_told_busy = True


class Servers:
    """Several servers of the same model. An asynchronous context manager."""

    def __init__(self, urls: Sequence[str], key: str, timeout: float) -> None:
        """`urls`: addresses in the form that OpenAI's clients take. Raises UsageError for an invalid address."""
        self._servers = [_Server(address(url).removesuffix("/v1")) for url in urls]
        self._key, self._timeout = key, timeout
        self._http: Any = require("aiohttp", "serve")

    async def __aenter__(self) -> Servers:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._session = self._http.ClientSession(
            headers=headers,
            timeout=self._http.ClientTimeout(self._timeout, sock_connect=10),
            connector=self._http.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def ask(self, line: Line) -> Reply:
        """Send a line to the server that has the fewest requests, and return the reply. Retries while servers
        are down or busy.

        Raises CanvasError if a server refuses the key, if it is Triton or does not speak HTTP, or if all servers are
        down for too long.
        """
        while True:
            server = await self._next()
            server.in_flight += 1
            try:
                reply, wait = await self._post(server, line)
            except (self._http.ClientSSLError, self._http.ClientResponseError) as error:
                scheme = server.root.partition(":")[0].upper()
                raise CanvasError(
                    f"the server at {server.root} does not speak {scheme}: {error}",
                    f"{PORT_HINT}; begin the address with http:// or https://, whichever the server uses",
                ) from error
            except self._http.ClientConnectorError as error:  # nothing was sent
                server.down(time.monotonic(), 0.0, str(error))
                self._check_patience(str(error))
                continue
            except (self._http.ClientError, TimeoutError, _NoAnswerError) as error:
                why = str(error) or f"no answer within {self._timeout:g} s"
                server.down(time.monotonic(), 0.0, why)
                return Reply(None, f"{server.root}: {why}")
            finally:
                server.in_flight -= 1
            if reply.status == 503:
                server.down(time.monotonic(), wait, _message(reply.body))
                self._check_patience(_message(reply.body))
                continue
            if (reply.status or 0) >= 500:  # let other servers have the next requests
                server.down(time.monotonic(), wait, _message(reply.body))
                return reply
            server.up()
            if reply.status == 429:
                server.busy(_message(reply.body))
                await asyncio.sleep(max(wait, _FIRST_REST))
                continue
            if reply.status in (401, 403):
                raise CanvasError(
                    f"{server.root} refused the request: {_message(reply.body)}",
                    f"set {KEY_VARIABLE} to one of the server's keys, and repeat the command",
                )
            if reply.body in _TRITON_REPLIES:
                raise CanvasError(f"the server at {server.root} is Triton", PORT_HINT)
            return reply

    async def _next(self) -> _Server:
        """Wait until a server is available. Return the available server that has the fewest requests."""
        while True:
            now = time.monotonic()
            if ready := [each for each in self._servers if each.rests_until <= now]:
                return min(ready, key=lambda each: each.in_flight)
            await asyncio.sleep(min(each.rests_until for each in self._servers) - now)

    async def _post(self, server: _Server, line: Line) -> tuple[Reply, float]:
        """Return a server's reply, and the seconds to wait according to its Retry-After header."""
        async with self._session.post(
            server.root + line.url,
            data=line.body,
            headers={"X-Request-Id": line.request_id},
            allow_redirects=False,
        ) as reply:
            text = await _read(reply)
            try:
                body = load_json(text, most=len(text))
                json.dumps(body, allow_nan=False)
            except ValueError:
                body = {"error": {"message": text[:_SHOWN], "type": "server_error"}}
            if reply.status == 200 and (not isinstance(body, dict) or body.get("error")):
                raise _NoAnswerError(f"no answer in the reply {text[:_SHOWN]!r}")
            wait = reply.headers.get("Retry-After", "")
            seconds = float(wait) if wait.isascii() and wait.isdigit() else 0.0
            return Reply(reply.status, body), min(seconds, _LONGEST_REST)

    def _check_patience(self, why: str) -> None:
        since = [each.down_since for each in self._servers]
        begun = max((each for each in since if each is not None), default=0.0)
        if None not in since and time.monotonic() - begun > PATIENCE:
            raise CanvasError(
                f"all servers have been down for {PATIENCE:g} s: {why}",
                "start a server, and repeat the command: it continues from here",
            )


async def _read(reply: Any) -> str:
    """Return a reply's text, decoded as UTF-8 regardless of its headers."""
    data = bytearray()
    async for piece in reply.content.iter_chunked(1 << 16):
        data += piece
        if len(data) > MOST_REPLY:
            raise _NoAnswerError(f"the reply has more than {MOST_REPLY >> 20} MiB")
    return data.decode(errors="replace")


def _message(body: Any) -> str:
    try:
        return str(body["error"]["message"])[:_SHOWN]
    except (KeyError, TypeError):
        return str(body)[:_SHOWN]
