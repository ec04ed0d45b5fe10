"""Bounds what one connection can hold: time for its header and body, unread answers, tiny chunks, and
places among all connections."""

from __future__ import annotations

import asyncio
import logging
import resource
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEADER_TIMEOUT = 10.0  # seconds, from the connection or the end of the answer before
BODY_TIMEOUT = 60.0
WRITE_TIMEOUT = 60.0  # while the caller reads nothing
# Places beyond the limit, in which only health routes are answered.
RESERVED = 32
_RESERVED_TIMEOUT = 2.0
# A chunk has at least six bytes beside its data, and takes some 30 µs of the event loop, with or without a key. So a
# body may have so many of those bytes, and one more for so many bytes of data.
_BESIDE, _DATA_PER_BYTE = 8192, 64
_SLICE = 4096  # bytes that are parsed at once
# Bytes that unread bodies may hold together; beyond, a connection that holds more than its share is closed.
_MOST_HELD, _SHARE = 512 * 2**20, 2**20


@dataclass
class Places:
    """The places of one server's connections. `reserved` are the callers beyond the limit."""

    limit: int
    held: int = 0  # bytes of bodies
    reserved: set[tuple[str, int] | None] = field(default_factory=set)
    idle: dict[Connection, None] = field(default_factory=dict)  # without a request, oldest first

    def make_room(self, open_now: int) -> None:
        """Close the connection that has waited longest without a request, if all places are taken."""
        if open_now > self.limit + RESERVED:
            for oldest in list(self.idle)[:1]:
                oldest.drop("every place is taken")


class Connection(H11Protocol):
    """One connection. `places` is set by `connections`."""

    places: Places

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stage = ""
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._wire = self._payload = 0  # bytes of this body, and of its data
        if len(self.connections) > self.places.limit:
            self.places.reserved.add(self.client)
        self.places.make_room(len(self.connections))
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._begin_body()
        self.places.reserved.discard(self.client)
        self.places.idle.pop(self, None)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), _SLICE):
            self._receive(data[begin : begin + _SLICE])
            if self._wire > self._payload + self._payload // _DATA_PER_BYTE + _BESIDE:
                self.drop("its chunks are too small")
                return
            if self.places.held > _MOST_HELD and self._payload > _SHARE:
                self.drop("there are too many large bodies")
                return
        self._follow()

    def _receive(self, data: bytes) -> None:
        """Parse some bytes, and count those of a body."""
        inside = self._current_stage() == "body"  # the parser bounds headers
        before = len(self.cycle.body) if self.cycle else 0
        super().data_received(data)
        came = max(0, len(self.cycle.body) - before) if self.cycle else 0
        self._payload += came
        self.places.held += came
        self._wire += len(data) if inside else 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._begin_body()
        self._follow()

    def _begin_body(self) -> None:
        self.places.held -= self._payload
        self._wire = self._payload = 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(
            WRITE_TIMEOUT, self.drop, f"it read nothing for {WRITE_TIMEOUT:g} s"
        )

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def drop(self, why: str) -> None:
        """Close the connection at once."""
        log.info("closing a connection of %s: %s", self.client, why)
        self.transport.abort()

    def _follow(self) -> None:
        """Give the stage of the connection its time."""
        stage = self._current_stage()
        if stage == self._stage or self.transport.is_closing():
            return
        self._stage = stage
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if stage == "header":
            self.places.idle[self] = None
        else:
            self.places.idle.pop(self, None)
        reserved = self.client in self.places.reserved
        seconds = {
            "header": _RESERVED_TIMEOUT if reserved else HEADER_TIMEOUT,
            "body": BODY_TIMEOUT,
        }.get(stage)
        if seconds is not None:
            why = f"its {stage} took longer than {seconds:g} s"
            self._timer = self.loop.call_later(seconds, self.drop, why)

    def _current_stage(self) -> str:
        if self.cycle is None or self.conn.their_state is h11.IDLE:
            return "header"
        return "body" if self.cycle.more_body else "answer"


def connections(limit: int) -> tuple[type[Connection], Places]:
    """Return a protocol for uvicorn that takes `limit` connections, and their places."""
    places = Places(limit)
    return type("LimitedConnection", (Connection,), {"places": places}), places


def raise_file_limit() -> None:
    """Let this process open as many files as it may: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bound_handshakes(seconds: float = HEADER_TIMEOUT) -> None:
    """Bound the time of TLS handshakes, for which uvicorn has no setting."""
    constants: Any = asyncio.constants  # type: ignore[attr-defined,unused-ignore]
    constants.SSL_HANDSHAKE_TIMEOUT = seconds
