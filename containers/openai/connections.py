"""Limits connections: their number, the time that they take for header and body, unread answers, and tiny chunks of a
body. Of these, uvicorn only limits the number of connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_remote_addr

from canvasrt.containers.logs import Seldom
from canvasrt.containers.openai.fair_parsing import Turns

log = logging.getLogger(__name__)

HEADER_TIMEOUT = 10.0  # seconds; also the limit of a TLS handshake
# Seconds for which an idle connection stays open after an answer. Clients (httpx 5, aiohttp 15) and load balancers
# (often 60) close earlier. If the server closed first, a request that is on its way would be lost.
KEEP_ALIVE = 75.0
BODY_TIMEOUT = 60.0
WRITE_TIMEOUT = 60.0  # maximum seconds that a caller may go without reading its answer
# Limits, in seconds and bytes, for discarding the rest of a body that was answered early. If a connection were closed
# with unread input, it would be reset, and the caller would lose the answer.
_LINGER_TIMEOUT, _LINGER_BYTES = 5.0, 64 * 2**20
_TLS_GOODBYE = 5.0  # seconds for a caller to confirm that its TLS connection ends
# Number of connections allowed beyond the limit. They only get health routes.
RESERVED = 32
_RESERVED_TIMEOUT = 2.0
# Parsing a piece of a body, such as a chunk, takes the event loop about 30 µs, even if the piece is tiny. So a body
# may have `_PIECES` pieces, plus one per `_BYTES_PER_PIECE` bytes.
_PIECES, _BYTES_PER_PIECE = 1024, 256
_FREE_PIECES = 16  # pieces parsed without waiting for a turn; ordinary bodies have fewer
# Every time this many bytes of a body have arrived, the connection counts as active again.
_PROGRESS = 4096
# Maximum bytes of the bodies of all unfinished requests together. Above this limit, a connection that receives more of
# a body is closed if that body has more than `_SHARE` bytes.
_MOST_HELD, _SHARE = 512 * 2**20, 2**20


class Stage(Enum):
    """The stage of a connection. All except ANSWER and GONE have time limits; uvicorn enforces the limit of KEPT."""

    HANDSHAKE = "handshake"  # the TLS handshake
    HEADER = "header"
    KEPT = "next request"  # idle after an answer
    UNREAD_BODY = "body"  # the application has not asked for the body yet
    BODY = "body that is read"
    ANSWER = "answer"  # the whole request was read; answering
    END = "end"  # answered early; discarding the rest of the body
    GONE = "gone"  # no longer counted


@dataclass
class Places:
    """Limits how many connections one server has, and holds the state that they share. `reserved` holds the
    addresses of callers beyond the limit, who only get health routes. `tls` is None if the server does not use TLS."""

    limit: int
    tls: ssl.SSLContext | None = None
    open: int = 0
    held: int = 0  # bytes of all unfinished bodies
    reserved: set[tuple[str, int] | None] = field(default_factory=set)
    # Connections that wait for their callers, in the order in which `enter` closes them.
    idle: OrderedDict[Connection, None] = field(default_factory=OrderedDict)
    turns: Turns = field(default_factory=Turns)
    closed: Seldom = field(default_factory=lambda: Seldom(log, logging.INFO))

    def connection(self, **given: Any) -> Connection:
        """Create the protocol of a new connection; called by uvicorn."""
        return Connection(self, **given)

    def enter(self, connection: Connection) -> None:
        """Admit a new connection. At the limit, first close the first connection in `idle`. If `idle` is empty, admit
        at most `RESERVED` connections beyond the limit."""
        if self.open >= self.limit and self.idle:
            next(iter(self.idle)).drop("it was idle and another caller needs a connection")
        self.open += 1
        if self.open > self.limit:
            self.reserved.add(connection.client)
        if self.open > self.limit + RESERVED:
            connection.drop("the limit of connections is reached")

    def leave(self, connection: Connection) -> None:
        """Stop counting a connection."""
        self.open -= 1
        self.reserved.discard(connection.client)
        self.idle.pop(connection, None)
        self.turns.leave(connection)


@dataclass
class _Body:
    """Counts the pieces and the bytes (`size`) of a body that were parsed so far. `progress` is the `size` at which the
    connection last counted as active."""

    pieces: int = 0
    size: int = 0
    progress: int = 0


class _Parser(h11.Connection):
    """An HTTP parser that pauses while `Connection.may_parse` is false."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(h11.SERVER)
        self._connection = connection

    def next_event(self) -> Any:
        if not self._connection.may_parse():
            return h11.NEED_DATA
        event = super().next_event()
        self._connection.follow(event)
        return event

    def send(self, event: Any) -> Any:
        if isinstance(event, h11.Response) and self._connection.is_sending:
            # The rest of the body will not be read, so the connection cannot be reused.
            headers = [each for each in event.headers if each[0] != b"connection"]
            headers.append((b"connection", b"close"))
            event = h11.Response(
                status_code=event.status_code, headers=headers, reason=event.reason
            )
        return super().send(event)


class _Transport:
    """The transport that uvicorn sees. It forwards `close` and `resume_reading` to the connection."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.close, self.resume_reading = connection.end, connection.read_on
        self.is_closing = lambda: connection.stage is Stage.END or transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(H11Protocol):
    """The asyncio protocol that handles one connection."""

    def __init__(self, places: Places, **given: Any) -> None:
        super().__init__(**given)
        self.conn = _Parser(self)
        self.timeout_keep_alive = KEEP_ALIVE  # type: ignore[assignment]
        self.places = places
        self.stage = Stage.HEADER
        self._body = _Body()
        self._early = b""  # bytes received during the TLS handshake
        self._thrown_away = 0
        self._timer: asyncio.TimerHandle | None = None  # limits the stage's duration
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.client = get_remote_addr(transport)
        self.connections.add(self)  # uvicorn closes all of `connections` when the server stops
        self.places.enter(self)
        if self.places.tls is None:
            self._open(transport)
        elif self.stage is not Stage.GONE:
            self._enter(Stage.HANDSHAKE)
            self._handshake = self.loop.create_task(self._secure(transport, self.places.tls))

    async def _secure(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        try:
            secured = await self.loop.start_tls(
                transport, self, context, server_side=True, ssl_shutdown_timeout=_TLS_GOODBYE
            )
        except OSError:  # the caller left, or did not speak TLS
            secured = None
        if secured is None or self.stage is Stage.GONE:
            self.leave()
            return
        self._open(secured)
        self.data_received(self._early)

    def _open(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        super().connection_made(_Transport(self, transport))  # type: ignore[arg-type]
        self._enter(Stage.HEADER)

    def data_received(self, data: bytes) -> None:
        if self.stage is Stage.HANDSHAKE:
            self._early += data
        elif self.stage is Stage.END:
            self._thrown_away += len(data)
            if self._thrown_away > _LINGER_BYTES:
                self.drop("it kept sending after its answer")
        elif data:
            if self.stage is Stage.KEPT:
                self._enter(Stage.HEADER)
            super().data_received(data)

    def may_parse(self) -> bool:
        """Return whether the next event may be parsed now. A body is only parsed when the application has asked for it.
        Pieces after the first `_FREE_PIECES` also wait for the connection's turn."""
        if self.stage is Stage.UNREAD_BODY or self.transport.is_closing():
            return False
        if self.stage is not Stage.BODY or self._body.pieces < _FREE_PIECES:
            return True
        if self.places.turns.has(self):
            return True
        self._transport.pause_reading()
        return False

    def read_on(self) -> None:
        """Parse the received part of the body and resume reading. Called when the application asks for the body, and
        when the connection's turn to parse comes."""
        if self.stage is Stage.UNREAD_BODY:
            self.stage = Stage.BODY  # without `_enter`, so that UNREAD_BODY's time limit continues
        if self.stage is Stage.BODY and not self.transport.is_closing():
            self.handle_events()
        if not (self.flow.read_paused or self.places.turns.is_waiting(self)):
            self._transport.resume_reading()

    def follow(self, event: Any) -> None:
        """Enter the stage that follows a parsed event."""
        if isinstance(event, h11.Request):
            lengths = {b"content-length", b"transfer-encoding"}
            if lengths <= {name for name, _ in event.headers}:
                # A proxy could have read such a request differently (request smuggling).
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
            has_body = any(
                name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
                for name, value in event.headers
            )
            self._enter(Stage.UNREAD_BODY if has_body else Stage.ANSWER)
            if has_body:  # paused until the application asks for the body
                self.flow.pause_reading()
        elif isinstance(event, h11.Data):
            self._count(len(event.data))
        elif isinstance(event, h11.EndOfMessage):
            self._enter(Stage.ANSWER)

    @property
    def is_sending(self) -> bool:
        """Whether the caller is still sending a body."""
        return self.stage in (Stage.UNREAD_BODY, Stage.BODY)

    def _count(self, size: int) -> None:
        """Count one piece, of `size` bytes, of the body. Close the connection if its pieces are too small, or if its
        body is large while all bodies together take too much memory."""
        body = self._body
        body.pieces += 1
        body.size += size
        self.places.held += size
        if body.size - body.progress >= _PROGRESS and self in self.places.idle:
            body.progress = body.size
            self.places.idle.move_to_end(self)
        if body.pieces > _PIECES + body.size // _BYTES_PER_PIECE:
            self.drop("the pieces of its body are too small")
        elif self.places.held > _MOST_HELD and body.size > _SHARE:
            self.drop("there are too many large bodies")

    def _forget_body(self) -> None:
        self.places.held -= self._body.size
        self._body = _Body()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the reply to a HEAD request has no body
            self.transport.close()

    def on_response_complete(self) -> None:
        self._forget_body()
        if self.stage is Stage.ANSWER and not self._transport.is_closing():
            self._enter(Stage.KEPT)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.stage is not Stage.GONE:
            self.places.idle[self] = None
        self._write_timer = self.loop.call_later(
            WRITE_TIMEOUT, self.drop, f"it read nothing for {WRITE_TIMEOUT:g} s"
        )

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stage is Stage.ANSWER:
            self.places.idle.pop(self, None)
        if self._write_timer is not None:
            self._write_timer.cancel()

    def shutdown(self) -> None:
        """Close the connection because the server stops, but finish its current answer."""
        if self.stage is Stage.HANDSHAKE:
            self.drop("the server stops")
        else:
            super().shutdown()

    def end(self) -> None:
        """Close the connection. A caller that is still sending a body first gets time to read the answer."""
        if not self.is_sending:
            self._transport.close()
            return
        self._enter(Stage.END)
        with contextlib.suppress(OSError):  # the caller may have left meanwhile
            if self._transport.can_write_eof():
                self._transport.write_eof()
        self._transport.resume_reading()

    def drop(self, why: str) -> None:
        """Close the connection at once."""
        self.places.closed.note(why, f"closing a connection of {self.client}: {why}")
        self.leave()
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_body()
        self.leave()
        if self.flow is not None:
            super().connection_lost(exc)

    def leave(self) -> None:
        """Stop counting the connection and cancel its timers."""
        if self.stage is Stage.GONE:
            return
        self.stage = Stage.GONE
        self.places.leave(self)
        self.connections.discard(self)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def _enter(self, stage: Stage) -> None:
        """Enter a stage: start its timer, and update the order in which idle connections are closed."""
        if self.stage is Stage.GONE:
            return
        self.stage = stage
        limits = {Stage.HANDSHAKE: HEADER_TIMEOUT, Stage.HEADER: HEADER_TIMEOUT}
        if self.client in self.places.reserved:
            limits = dict.fromkeys((*limits, Stage.KEPT), _RESERVED_TIMEOUT)
        limits |= {Stage.UNREAD_BODY: BODY_TIMEOUT, Stage.END: _LINGER_TIMEOUT}
        if self._timer is not None:
            self._timer.cancel()
        if seconds := limits.get(stage):
            why = f"its {stage.value} took longer than {seconds:g} s"
            self._timer = self.loop.call_later(seconds, self.drop, why)
        self.places.idle.pop(self, None)
        if stage is not Stage.ANSWER:
            self.places.idle[self] = None
            # Connections whose request was already answered are closed first.
            self.places.idle.move_to_end(self, last=stage is not Stage.END)
