"""The thread that owns the generator: admits requests as they arrive and hands out their events."""

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

# Asking Triton whether a caller has gone costs about 0.1 ms, so it is not done every step.
CANCEL_INTERVAL = 0.05
MAX_WAITING = 1024


class Sink(Protocol):
    """Where one request's events go. Called on the worker's thread alone."""

    def event(self, event: Event) -> None: ...

    def fail(self, error: Exception) -> None:
        """The request ends here, without a result."""
        ...

    def cancelled(self) -> bool: ...


class Overloaded(CanvasError):
    """Too many requests wait already; nothing is wrong with this one."""


class Worker:
    """Runs a generator in a thread of its own.

    `make` builds the generator; it is called again after a failed pass, whose requests get the
    error. `observe` is called around every step with the generator and
    the number of requests in flight.
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
        """Queues a request. CanvasError when it can never run, Overloaded when too many wait."""
        model = self._generator.model
        request.validate(model.config, model.max_context)
        if self._arrived.qsize() + len(self._sinks) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests wait already", "send it again later")
        if self._closing:
            raise Overloaded("the server is stopping", "send it to another server")
        self._arrived.put((request, sink))

    def close(self) -> None:
        """Ends what is still running with an error, and the thread."""
        self._closing = True
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._admit()
            self._report()  # before anybody hears of a request that does not count yet
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
        self._fail_all(Overloaded("the server is stopping", "send it to another server"))

    def _report(self) -> None:
        if self._observe is not None:
            try:
                self._observe(self._generator, len(self._sinks) + self._arrived.qsize())
            except Exception:
                log.exception("the metrics could not be updated")

    def _admit(self) -> None:
        """Takes in all that has arrived; waits for something when there is nothing to do."""
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
            if _is_gone(sink):
                self._generator.cancel(id)

    def _deliver(self, event: Event) -> None:
        sink = self._sinks.get(event.id)
        if isinstance(event, Finished):
            self._sinks.pop(event.id, None)
        if sink is None:
            return
        try:
            sink.event(event)
        except Exception:  # nobody is there to take its events
            log.exception("an event could not be sent")
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


def _is_gone(sink: Sink) -> bool:
    try:
        return sink.cancelled()
    except Exception:
        log.exception("a caller could not be asked whether it is there")
        return True


def _fail(sink: Sink, error: Exception) -> None:
    """One caller's trouble is not the others'."""
    try:
        sink.fail(error)
    except Exception:
        log.exception("an error reply could not be sent")
