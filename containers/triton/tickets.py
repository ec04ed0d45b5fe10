"""From arrival to end, every request has a ticket, which knows its caller and deadline. Tickets limit the number of
requests."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from canvasrt.containers.tensors import HINT
from canvasrt.errors import CanvasError, EngineError

if TYPE_CHECKING:
    from canvasrt.runtime.request import Event

log = logging.getLogger(__name__)

MAX_WAITING = 1024
# Seconds between checks for cancelled requests. A check takes about 0.1 ms in Triton, too long for every step.
CANCEL_INTERVAL = 0.05


class Sink(Protocol):
    """Receives one request's events. `fail` can be called from several threads, and only the first call counts. The
    worker's thread calls the other methods."""

    def event(self, event: Event) -> None: ...

    def fail(self, error: BaseException) -> None:
        """End the request without a result."""
        ...

    def cancelled(self) -> bool: ...


class Overloaded(CanvasError):
    """The server cannot accept the request now, although the request is valid."""


class Busy(Overloaded):
    """A limit on waiting requests was reached."""


class Late(CanvasError):
    """The request took longer than the operator allows."""


class Ticket:
    """The ticket of one request, from before its preparation to its end."""

    def __init__(self, tickets: Tickets, owner: str, sink: Sink, begin: float) -> None:
        self.owner, self.sink, self.begin = owner, sink, begin
        self.tokens = 0
        self.is_late = False
        self.worker: object = None  # the worker at which the request waits or runs
        self._tickets = tickets

    def take_tokens(self, count: int) -> None:
        """Count the tokens of a prepared request. Raises Busy if all requests together have too many tokens."""
        self._tickets.count_tokens(self, count)

    def check_late(self) -> None:
        """Raise Late if the request's deadline has passed."""
        self._tickets.check_late(self.begin)

    def leave(self) -> None:
        """Give the ticket back. Can be called more than once."""
        self._tickets.remove(self)


class Tickets:
    """The tickets of all requests. Thread-safe."""

    def __init__(self, most: int, max_tokens: int | None, timeout: float | None) -> None:
        """most: maximum number of requests; one API key can have half of them. max_tokens: maximum tokens of all
        requests together, prompts plus new tokens. timeout: maximum seconds per request."""
        self._most, self._max_tokens, self._timeout = most, max_tokens, timeout
        self._lock = threading.Lock()
        self._taken: dict[Ticket, None] = {}
        self._by_owner: Counter[str] = Counter()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, owner: str, sink: Sink, begin: float) -> Ticket:
        """Return a ticket for a request that arrived at `begin`. Raises Busy if there are too many requests."""
        ticket = Ticket(self, owner, sink, begin)
        with self._lock:
            if len(self._taken) >= self._most:
                raise Busy(f"{self._most} requests are already waiting", "try again later")
            if owner and (own := self._by_owner[owner]) >= self._most // 2:
                raise Busy(f"{own} requests of this key are already waiting", "try again later")
            self._taken[ticket] = None
            self._by_owner[owner] += 1
        return ticket

    def count_tokens(self, ticket: Ticket, count: int) -> None:
        """Count a request's tokens. Raises Busy if all requests together have too many tokens."""
        with self._lock:
            # If no other request has tokens, a request is admitted however long it is.
            if self._max_tokens and self.tokens and self.tokens + count > self._max_tokens:
                raise Busy(
                    f"all requests together have {self.tokens} tokens of at most {self._max_tokens}",
                    "try again later",
                )
            if ticket in self._taken:
                ticket.tokens += count
                self.tokens += count

    def remove(self, ticket: Ticket) -> None:
        """Give back a ticket and its tokens."""
        with self._lock:
            if ticket not in self._taken:
                return
            del self._taken[ticket]
            self.tokens -= ticket.tokens
            self._by_owner[ticket.owner] -= 1
            if not self._by_owner[ticket.owner]:
                del self._by_owner[ticket.owner]

    def count_of(self, owner: str, worker: object) -> int:
        """Return how many of a caller's requests wait or run at a worker."""
        with self._lock:
            return sum(each.owner == owner and each.worker is worker for each in self._taken)

    def check_late(self, begin: float, now: float | None = None) -> None:
        """Raise Late if the deadline of a request that arrived at `begin` has passed."""
        now = time.monotonic() if now is None else now
        if self._timeout is not None and now - begin > self._timeout:
            raise Late(
                f"the request took longer than {self._timeout:g} s", "ask for fewer tokens or steps"
            )

    def end_late(self) -> list[Ticket]:
        """Fail all requests whose deadline has passed, at any stage; return their tickets.

        Does not give the tickets back: the code that processes each request does.
        """
        if self._timeout is None:
            return []
        now, found = time.monotonic(), []
        with self._lock:
            taken = [ticket for ticket in self._taken if not ticket.is_late]
        for ticket in taken:
            try:
                self.check_late(ticket.begin, now)
            except Late as error:
                ticket.is_late = True
                found.append(ticket)
                fail(ticket.sink, error)
        return found


def fail(sink: Sink, error: BaseException) -> None:
    """Fail one request. Suppresses exceptions of the sink, so that other requests are not affected."""
    try:
        sink.fail(error)
    except Exception:
        log.exception("cannot send an error reply")


def describe(error: BaseException) -> tuple[str, str]:
    """Return Triton's code for an error, and its message with the hint; an EngineError's hint is left out."""
    if isinstance(error, EngineError):
        return "INTERNAL", error.message
    if isinstance(error, CanvasError):
        codes = {Busy: "RESOURCE_EXHAUSTED", Late: "DEADLINE_EXCEEDED", Overloaded: "UNAVAILABLE"}
        code = codes.get(type(error), "INVALID_ARG")
        return code, f"{error.message}{HINT}{error.hint}" if error.hint else error.message
    return "INTERNAL", f"{type(error).__name__}: {error}"
