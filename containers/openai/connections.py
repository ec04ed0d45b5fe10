"""Bounds what one connection can hold: time for its header and body, unread answers, small pieces, and
places among all connections."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_remote_addr

from canvasrt.containers.logs import Seldom
from canvasrt.containers.openai.parse_turns import Turns

log = logging.getLogger(__name__)

HEADER_TIMEOUT = 10.0  # seconds, from the end of the answer before; as many for a TLS handshake
BODY_TIMEOUT = 60.0
WRITE_TIMEOUT = 60.0  # while the caller reads nothing
# How long, and for how many bytes, what follows an answer is read and thrown away: closing a connection on which
# something is unread resets it, and its caller would not see the answer.
_LINGER_TIMEOUT, _LINGER_BYTES = 5.0, 64 * 2**20
# Places beyond the limit, in which only health routes are answered.
RESERVED = 32
_RESERVED_TIMEOUT = 2.0
# A piece of a body, such as a chunk, takes some 30 µs of the event loop, however small. So a body may have so many, and
# one more for so many bytes of data.
_PIECES, _BYTES_PER_PIECE = 1024, 256
_FREE_PIECES = 16  # that wait for no turn, so that ordinary bodies do not
_PROGRESS = 4096  # bytes of a body that count as progress
# Bytes that unread bodies may hold together; beyond, a connection that holds more than its share is closed.
_MOST_HELD, _SHARE = 512 * 2**20, 2**20


@dataclass
class Places:
    """The places of one server's connections. `reserved` are the callers beyond the limit."""

    limit: int
    open: int = 0
    held: int = 0  # bytes of bodies
    reserved: set[tuple[str, int] | None] = field(default_factory=set)
    # Connections that wait for their callers. First comes the one whose caller did nothing for longest.
    idle: OrderedDict[Connection, None] = field(default_factory=OrderedDict)
    closed: Seldom = field(default_factory=lambda: Seldom(log, logging.INFO))

    def enter(self, connection: Connection) -> None:
        """Give a new connection a place: if all are taken, that of the one that has waited for its
        caller longest."""
        if self.open >= self.limit and self.idle:
            next(iter(self.idle)).drop("another caller needs its place")
        self.open += 1
        if self.open > self.limit:
            self.reserved.add(connection.client)
        if self.open > self.limit + RESERVED:
            connection.drop("every place is taken")

    def leave(self, connection: Connection) -> None:
        """Take a connection's place back."""
        self.open -= 1
        self.reserved.discard(connection.client)
        self.idle.pop(connection, None)


class _Parser(h11.Connection):
    """Parses what has come, as far as its connection says."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(h11.SERVER)
        self._connection = connection

    def next_event(self) -> Any:
        if not self._connection.may_parse():
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._connection.begin(event)
        elif isinstance(event, h11.Data):
            self._connection.count(len(event.data))
        return event

    def send(self, event: Any) -> Any:
        if isinstance(event, h11.Response) and self._connection.is_sending:
            # The rest of the body will not be read.
            headers = [(name, value) for name, value in event.headers if name != b"connection"]
            event = h11.Response(
                status_code=event.status_code,
                headers=[*headers, (b"connection", b"close")],
                reason=event.reason,
            )
        return super().send(event)


class _Flow(FlowControl):
    """Tells a connection when the application asks for the body."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        self.read_paused = False
        self._connection.asked()


class _Transport:
    """A transport whose closing is left to its connection."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connection, self._transport = connection, transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._connection.end()

    def is_closing(self) -> bool:
        return self._connection.ending or self._transport.is_closing()


class Connection(H11Protocol):
    """One connection. `places` and `turns` are set by `connections`."""

    places: Places
    turns: Turns

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.conn = _Parser(self)
        self._transport: Any = None  # once it has a place
        self.ending = self._left = False
        self._stage = ""
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._has_body = self._wanted = False  # of this request; by the application
        self._pieces = self._payload = self._progress = 0  # of this body
        self._thrown_away = 0

    def enter(self, transport: asyncio.BaseTransport) -> None:
        """Take a place as soon as the connection is accepted, before its handshake if there is one."""
        self._transport = transport
        self.client = get_remote_addr(transport)  # type: ignore[arg-type,unused-ignore]
        self.connections.add(self)  # which end when the server does
        self.places.enter(self)
        self._follow()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._transport is None:
            self.enter(transport)
        super().connection_made(transport)
        self.flow = _Flow(self, transport)
        self._transport = transport
        self.transport = _Transport(self, transport)  # type: ignore[assignment]
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_body()
        self.leave()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End an idle connection, since the server ends."""
        if self._in_handshake:
            self.drop("the server ends")
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        if not self.ending:
            super().data_received(data)
            self._follow()
            return
        self._thrown_away += len(data)
        if self._thrown_away > _LINGER_BYTES:
            self.drop("it went on after its answer")

    def proceed(self) -> None:
        """Parse more of what has come."""
        if not self.transport.is_closing():
            self.handle_events()
            self._follow()

    def asked(self) -> None:
        """Parse the body that the application asks for."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._wanted = True
            self.proceed()

    @property
    def is_sending(self) -> bool:
        """Whether the caller still sends a body."""
        return self._has_body and self.conn.their_state is h11.SEND_BODY

    def may_parse(self) -> bool:
        """Return whether the next event may be parsed now: one of a body must be wanted, and have its
        turn."""
        if self.transport.is_closing():
            return False
        if not self.is_sending:
            return True
        return self._wanted and (self._pieces < _FREE_PIECES or self.turns.take(self))

    def begin(self, request: h11.Request) -> None:
        """Begin a request, whose body is parsed once it is wanted."""
        self._wanted = False
        self._has_body = any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
            for name, value in request.headers
        )

    def count(self, size: int) -> None:
        """Count a piece of a body; close the connection if there are too many."""
        self._pieces += 1
        self._payload += size
        self.places.held += size
        if self._payload - self._progress >= _PROGRESS and self in self.places.idle:
            self._progress = self._payload
            self.places.idle.move_to_end(self)
        if self._pieces > _PIECES + self._payload // _BYTES_PER_PIECE:
            self.drop("the pieces of its body are too small")
        elif self.places.held > _MOST_HELD and self._payload > _SHARE:
            self.drop("there are too many large bodies")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._forget_body()
        self._follow()

    def _forget_body(self) -> None:
        self.places.held -= self._payload
        self._pieces = self._payload = self._progress = 0

    def pause_writing(self) -> None:
        super().pause_writing()
        if not self._left:
            self.places.idle[self] = None
        self._write_timer = self.loop.call_later(
            WRITE_TIMEOUT, self.drop, f"it read nothing for {WRITE_TIMEOUT:g} s"
        )

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stage == "answer":
            self.places.idle.pop(self, None)
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def end(self) -> None:
        """Close the connection; one that still sends a body, once its caller had time to read the
        answer."""
        if self.ending or not self.is_sending:
            self._transport.close()
            return
        self.ending = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._follow()

    def drop(self, why: str) -> None:
        """Close the connection at once."""
        self.places.closed.note(why, f"closing a connection of {self.client}: {why}")
        self.leave()
        self._transport.abort()

    def leave(self) -> None:
        """Give the connection's place back."""
        if self._left:
            return
        self._left = True
        self.places.leave(self)
        self.turns.leave(self)
        self.connections.discard(self)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    @property
    def _in_handshake(self) -> bool:
        return self.flow is None

    def _follow(self) -> None:
        """Read on, or wait, and give the stage of the connection its time."""
        if self._left or self._transport.is_closing():
            return
        if not self._in_handshake:
            self._set_reading()
        stage = self._current_stage()
        if stage != self._stage:
            self._stage = stage
            self._set_timer()
            self._set_idle()

    def _set_reading(self) -> None:
        held = self.is_sending and (not self._wanted or self.turns.waits(self))
        if (held or self.flow.read_paused) and not self.ending:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        reserved = self.client in self.places.reserved
        seconds = {
            "handshake": _RESERVED_TIMEOUT if reserved else HEADER_TIMEOUT,
            "header": _RESERVED_TIMEOUT if reserved else HEADER_TIMEOUT,
            "body": BODY_TIMEOUT,
            "end": _LINGER_TIMEOUT,
        }.get(self._stage)
        if seconds is not None:
            why = f"its {self._stage} took longer than {seconds:g} s"
            self._timer = self.loop.call_later(seconds, self.drop, why)

    def _set_idle(self) -> None:
        """Say whether the connection waits for its caller; at its end, it makes room first."""
        self.places.idle.pop(self, None)
        if self._stage != "answer":
            self.places.idle[self] = None
            self.places.idle.move_to_end(self, last=self._stage != "end")

    def _current_stage(self) -> str:
        if self._in_handshake:
            return "handshake"
        if self.ending:
            return "end"
        if self.cycle is None or self.conn.their_state is h11.IDLE:
            return "header"
        return "body" if self.cycle.more_body else "answer"


def connections(limit: int) -> tuple[type[Connection], Places]:
    """Return a protocol for uvicorn that takes `limit` connections, and their places."""
    places = Places(limit)
    shared = {"places": places, "turns": Turns()}
    return type("LimitedConnection", (Connection,), shared), places
