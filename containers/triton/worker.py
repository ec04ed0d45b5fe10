"""The thread that runs the generator: admits requests as they arrive, and delivers their events."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from canvasrt.containers.triton.failure_limiter import MOST, WINDOW, FailureLimiter
from canvasrt.containers.triton.tickets import (
    CANCEL_INTERVAL,
    MAX_WAITING,
    Busy,
    Overloaded,
    Sink,
    Ticket,
    Tickets,
    fail,
)
from canvasrt.errors import CanvasError, EngineError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.request import Event, Finished, Request

log = logging.getLogger(__name__)

CANCEL_CHECKS = 16  # number of waiting requests to check for cancellation at a time
ADMITTED = 16  # maximum number of requests to admit between two steps, because prompts can be long
MAX_FAILURES = (
    3  # failed passes in a row before giving up; a successful pass or probe resets the count
)
IDLE_BEAT = 0.5  # seconds between beats while idle
STUCK = 5.0  # seconds without a beat after which other workers get the new requests
_STOPPING = ("the server is stopping", "send the request to another server")


class Worker:
    """Runs a generator on a separate thread.

    `make` creates the generator. After a failed pass, all requests that have been in a pass get an EngineError, and
    `make` is called again. Then the worker tests the engines with a short request of its own, the probe. If they work,
    the failure is counted against callers, as `_replace_generator` describes. `observe` is called around every step
    with the generator and the number of requests in flight; `beat` is called whenever there is progress, and regularly
    while idle.

    If no pass can succeed any more, all requests fail, new requests are refused, and `lost` is called with the reason.
    """

    def __init__(
        self,
        make: Callable[[], Generator],
        observe: Callable[[Generator, int], None] | None = None,
        beat: Callable[[], None] = lambda: None,
        lost: Callable[[EngineError], None] = lambda error: None,
        max_tokens: int | None = None,
        timeout: float | None = None,
        peers: Sequence[Worker] = (),
    ) -> None:
        """max_tokens, timeout: see `Tickets`. peers: other workers, with which this one shares tickets and failure
        counts. Requests that wait here move to peers that have a free place."""
        first = peers[0] if peers else None
        own = Tickets(MAX_WAITING, max_tokens, timeout)
        self.tickets: Tickets = first.tickets if first else own
        self._limiter: FailureLimiter = first._limiter if first else FailureLimiter()
        self._peers = peers
        self._next_check = 0
        self._make = make
        self._observe = observe
        self._notify, self.beaten = beat, time.monotonic()
        self._lost = lost
        self._failures = 0  # consecutive failures
        self._refusal: Overloaded | None = None
        self._generator = make()
        self._arrived: queue.SimpleQueue[_Known | None] = queue.SimpleQueue()
        self._known: dict[int, _Known] = {}  # keyed by the request's id
        self._closing = False
        self._cancel_check = 0.0
        self._thread = threading.Thread(target=self._run, name="canvasrt-worker", daemon=True)
        self._thread.start()

    @property
    def load(self) -> int:
        """Number of running and waiting requests."""
        return len(self._known) + self._arrived.qsize()

    @property
    def is_free(self) -> bool:
        """Whether the worker accepts requests, and its batch has a place for one more."""
        works = self._refusal is None and not self._closing
        return works and self.load < self._generator.max_batch

    @property
    def is_stuck(self) -> bool:
        """Whether the worker's pass takes so long that its GPU may have stalled. Such a worker gets
        no new requests, unless all workers are stuck."""
        return time.monotonic() - self.beaten > STUCK

    def count(self, owner: str) -> int:
        """Return how many of a caller's requests wait or run here."""
        return self.tickets.count_of(owner, self)

    def take_ticket(self, owner: str, sink: Sink, begin: float | None = None) -> Ticket:
        """Return a ticket for a request that arrived at `begin`, by default now. Call this before slow preparation.
        Raises Overloaded if the worker cannot accept the request now."""
        if self._refusal is not None:
            raise self._refusal
        if self._limiter.refuses(owner):
            raise _refused()
        if self._closing:
            raise Overloaded(*_STOPPING)
        return self.tickets.take(owner, sink, time.monotonic() if begin is None else begin)

    def submit(self, request: Request, ticket: Ticket) -> None:
        """Queue a request, whose ticket is given back when it ends. If all requests together have too many tokens,
        gives the ticket back and raises Overloaded. If the request is invalid or late, its sink gets the error."""
        try:
            ticket.check_late()
            self._generator.check(request)
            ticket.take_tokens(len(request.prompt_token_ids) + request.new_tokens)
        except Overloaded:
            ticket.leave()
            raise
        except CanvasError as error:
            ticket.leave()
            fail(ticket.sink, error)
            return
        except BaseException:
            ticket.leave()
            raise
        self._queue(_Known(request, ticket))

    def _queue(self, known: _Known) -> None:
        known.ticket.worker = self
        self._arrived.put(known)
        # If the worker has stopped since the ticket was taken, only this call can still fail the request.
        if self._refusal is not None or self._closing:
            self._fail_arrived(self._refusal or Overloaded(*_STOPPING))

    def close(self) -> None:
        """Fail the remaining requests, and end the thread."""
        self._closing = True
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # otherwise waiting requests would get no answer
            log.exception("the worker failed")
            self._give_up(_engine_error(error))

    def _work(self) -> None:
        while not self._closing and self._refusal is None:
            self._admit()
            self._hand_over()
            self._beat()
            self._report()  # update metrics before a caller gets a reply
            self._drop_cancelled()
            idle = self._generator.idle
            try:
                events = self._generator.step()
            except Exception as error:  # one failed pass must not take the server down
                log.exception("a pass failed")
                self._restart(_engine_error(error))
                self._report()
                continue
            self._failures = self._failures if idle else 0
            self._beat()
            for event in events:
                self._deliver(event)
            self._report()
        if self._refusal is None:
            self._fail_all(Overloaded(*_STOPPING))
            self._fail_arrived(Overloaded(*_STOPPING))

    def _beat(self) -> None:
        self.beaten = time.monotonic()
        self._notify()

    def _report(self) -> None:
        if self._observe is not None:
            try:
                self._observe(self._generator, len(self.tickets))
            except Exception:
                log.exception("cannot update the metrics")

    def _admit(self) -> None:
        """Admit some of the arrived requests. When idle, wait for one."""
        wait, left = self._generator.idle, ADMITTED
        while left and not self._closing and (wait or not self._arrived.empty()):
            self._beat()
            try:
                arrived = self._arrived.get(timeout=IDLE_BEAT)
            except queue.Empty:
                self._drop_late()
                self._report()  # requests that never arrived here may have ended
                continue
            wait = False
            left -= 1
            if arrived is not None:
                self._take(arrived)

    def _take(self, known: _Known) -> None:
        try:
            known.ticket.check_late()
            if self._limiter.refuses(known.request.owner):
                raise _refused()
            id = self._generator.add(known.request, is_checked=True)
        except Exception as error:
            known.ticket.leave()
            fail(known.ticket.sink, error)
            return
        self._known[id] = known

    def _hand_over(self) -> None:
        """Give requests that wait for their first pass to workers that have a place for them."""
        while self.load > self._generator.max_batch:
            places = [each for each in self._peers if each.is_free and not each.is_stuck]
            free = min(places, key=_load, default=None)
            id = self._generator.withdraw() if free else None
            if free is None or id is None:
                return
            free._queue(self._known.pop(id))

    def _drop_cancelled(self) -> None:
        now = time.monotonic()
        if now < self._cancel_check:
            return
        self._cancel_check = now + CANCEL_INTERVAL
        self._drop_late()
        # Waiting requests use no resources, so only some are checked at a time.
        running = self._generator.running
        waiting = [id for id in self._known if id not in running]
        begin = self._next_check % max(1, len(waiting))
        self._next_check = begin + CANCEL_CHECKS
        for id in [*running, *waiting[begin : begin + CANCEL_CHECKS]]:
            if id in self._known and _is_cancelled(self._known[id].ticket.sink):
                self._generator.cancel(id)

    def _drop_late(self) -> None:
        self.tickets.end_late()
        for id, known in self._known.items():
            if known.ticket.is_late:
                self._generator.cancel(id)

    def _deliver(self, event: Event) -> None:
        known = self._known.get(event.id)
        if known is None:
            return
        known.begun = True
        if isinstance(event, Finished):
            self._forget(event.id)
        if known.ticket.is_late:  # its sink already has the error
            return
        try:
            known.ticket.sink.event(event)
        except BaseException:  # a sink's failure, even a library's panic, must not end the worker
            log.exception("cannot send an event")
            self._generator.cancel(event.id)

    def _forget(self, id: int) -> None:
        if id in self._known:
            self._known.pop(id).ticket.leave()

    def _restart(self, error: EngineError) -> None:
        """Create a new generator after a failed pass, or give up."""
        self._generator.model.counters.failed_passes += 1
        self._failures += 1
        if self._failures >= MAX_FAILURES and not error.fatal:
            message = f"{self._failures} passes in a row failed; the last: {error.message}"
            error = EngineError(message, error.hint, fatal=True)
        if error.fatal:
            self._give_up(error)
            return
        suspects = [self._known[id] for id in self._generator.running if id in self._known]
        waiting = self._take_untouched()
        self._fail_all(error)
        try:
            self._replace_generator(suspects)
        except Exception as again:
            log.exception("the generator cannot be replaced")
            for known in waiting:
                known.ticket.leave()
                fail(known.ticket.sink, error)
            self._give_up(_engine_error(again))
            return
        for known in waiting:
            self._take(known)
            self._beat()

    def _take_untouched(self) -> list[_Known]:
        """Remove and return the generator's requests that have not been in a pass yet."""
        running = self._generator.running
        untouched = [
            id
            for id, known in self._known.items()
            if id not in running and not known.begun and not known.ticket.is_late
        ]
        return [self._known.pop(id) for id in untouched]

    def _replace_generator(self, suspects: list[_Known]) -> None:
        """Create a new generator. If the engines work, count the failure against the callers of the `suspects` that
        have had no event yet. If all have had events, count it against the callers of all `suspects`."""
        self._generator.abandon()
        self._generator = self._make()
        if self._probe():
            self._failures = 0
            fresh = [known for known in suspects if not known.begun] or suspects
            self._limiter.count(known.request.owner for known in fresh)
        else:
            self._generator.abandon()
            self._generator = self._make()

    def _probe(self) -> bool:
        """Return whether the engines can run the probe."""
        try:
            self._generator.probe()
        except Exception as error:
            if isinstance(error, EngineError) and error.fatal:
                raise
            log.exception("the probe also failed")
            return False
        return True

    def _give_up(self, error: EngineError) -> None:
        self._refusal = Overloaded(
            f"the engines have failed: {error.message}", "the server must be started again"
        )
        self._fail_all(error)
        self._fail_arrived(error)
        self._lost(error)

    def _fail_all(self, error: Exception) -> None:
        sinks = [known.ticket.sink for known in self._known.values()]
        for id in list(self._known):
            self._forget(id)
        for sink in sinks:
            fail(sink, error)

    def _fail_arrived(self, error: Exception) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                arrived = self._arrived.get_nowait()
                if arrived is not None:
                    arrived.ticket.leave()
                    fail(arrived.ticket.sink, error)


@dataclass
class _Known:
    """A prepared request. `begun`: whether the request has had an event."""

    request: Request
    ticket: Ticket
    begun: bool = False


def _load(worker: Worker) -> int:
    return worker.load


def _refused() -> Busy:
    return Busy(
        f"requests with this API key made {MOST} passes fail within {WINDOW:g} seconds",
        "try again later",
    )


def _engine_error(error: BaseException) -> EngineError:
    """Convert a pass's error to an EngineError: the requests are not at fault, since they were checked before."""
    if isinstance(error, EngineError):
        return error
    if isinstance(error, CanvasError):
        return EngineError(error.message, error.hint)
    return EngineError(f"{type(error).__name__}: {error}")


def _is_cancelled(sink: Sink) -> bool:
    try:
        return sink.cancelled()
    except Exception:
        log.exception("cannot tell whether a request was cancelled")
        return True
