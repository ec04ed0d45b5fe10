"""The thread that runs the generator: admits requests as they arrive, and delivers their events."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from canvasrt.errors import CanvasError
from canvasrt.runtime.generator import Event, Finished, Generator, Request

log = logging.getLogger(__name__)

# Asking Triton whether a request was cancelled takes about 0.1 ms, too long to do at each step.
CANCEL_INTERVAL = 0.05
MAX_WAITING = 1024


class Sink(Protocol):
    """Receives one request's events. Called only on the worker's thread."""

    def event(self, event: Event) -> None: ...

    def fail(self, error: Exception) -> None:
        """End the request without a result."""
        ...

    def cancelled(self) -> bool: ...


class Overloaded(CanvasError):
    """The server cannot take the request now; nothing is wrong with it."""


class Worker:
    """Runs a generator in a thread of its own.

    `make` returns the generator. It is called again after a failed pass, whose requests all get the
    error. `observe` is called around each step, with the generator and the number of requests in
    flight.
    """

    def __init__(
        self,
        make: Callable[[], Generator],
        observe: Callable[[Generator, int], None] | None = None,
    ) -> None:
        self._make = make
        self._observe = observe
        self._generator = make()
        self._arrived: queue.SimpleQueue[tuple[Request, Sink] | None] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._closing = False
        self._cancel_check = 0.0
        self._thread = threading.Thread(target=self._run, name="canvasrt-worker", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request. Overloaded when too many wait; `sink` gets the error of one that cannot
        run."""
        if self._arrived.qsize() + len(self._sinks) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests are already waiting", "try again later")
        if self._closing:
            raise Overloaded("the server is stopping", "send the request to another server")
        self._arrived.put((request, sink))

    def close(self) -> None:
        """Fail the requests that are still running, and end the thread."""
        self._closing = True
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._admit()
            self._report()  # before a caller can hear of a request that is not counted yet
            self._drop_cancelled()
            try:
                events = self._generator.step()
            except Exception as error:  # a failed pass must not take the server down
                log.exception("a pass failed")
                self._restart(error)
                continue
            for event in events:
                self._deliver(event)
            self._report()
        self._fail_all(Overloaded("the server is stopping", "send the request to another server"))

    def _report(self) -> None:
        if self._observe is not None:
            try:
                self._observe(self._generator, len(self._sinks) + self._arrived.qsize())
            except Exception:
                log.exception("cannot update the metrics")

    def _admit(self) -> None:
        """Admit every request that has arrived; wait for one when idle."""
        wait = self._generator.idle
        while wait or not self._arrived.empty():
            arrived = self._arrived.get()
            wait = False
            if arrived is None:
                continue
            request, sink = arrived
            try:
                self._sinks[self._generator.add(request)] = sink
            except Exception as error:
                _fail(sink, error)

    def _drop_cancelled(self) -> None:
        now = time.monotonic()
        if now < self._cancel_check:
            return
        self._cancel_check = now + CANCEL_INTERVAL
        for id, sink in self._sinks.items():
            if _is_cancelled(sink):
                self._generator.cancel(id)

    def _deliver(self, event: Event) -> None:
        sink = self._sinks.get(event.id)
        if isinstance(event, Finished):
            self._sinks.pop(event.id, None)
        if sink is None:
            return
        try:
            sink.event(event)
        except Exception:  # nobody takes its events any more
            log.exception("cannot send an event")
            self._generator.cancel(event.id)

    def _restart(self, error: Exception) -> None:
        self._fail_all(error)
        self._generator = self._make()

    def _fail_all(self, error: Exception) -> None:
        sinks = list(self._sinks.values())
        self._sinks.clear()
        while self._closing and not self._arrived.empty():
            arrived = self._arrived.get()
            if arrived is not None:
                sinks.append(arrived[1])
        for sink in sinks:
            _fail(sink, error)


def _is_cancelled(sink: Sink) -> bool:
    try:
        return sink.cancelled()
    except Exception:
        log.exception("cannot tell whether a request was cancelled")
        return True


def _fail(sink: Sink, error: Exception) -> None:
    """Fail one request; its errors must not reach the others."""
    try:
        sink.fail(error)
    except Exception:
        log.exception("cannot send an error reply")
