"""The thread that runs the generator: admits requests as they arrive, and delivers their events."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from canvasrt.errors import CanvasError, EngineError
from canvasrt.runtime.generator import Event, Finished, Generator, Work

log = logging.getLogger(__name__)

# Asking Triton whether a request was cancelled takes about 0.1 ms, too long to do at each step.
CANCEL_INTERVAL = 0.05
MAX_WAITING = 1024
MAX_FAILURES = 3  # failed passes in a row
IDLE_BEAT = 0.5  # seconds
_STOPPING = ("the server is stopping", "send the request to another server")


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

    `make` returns the generator. It is called again after a failed pass, whose requests all get an
    EngineError. `observe` is called around each step, with the generator and the number of requests
    in flight; `beat` whenever there is progress, and now and then while idle.

    When no pass can succeed any more, every request is failed and refused, and `lost` is called
    with the reason.
    """

    def __init__(
        self,
        make: Callable[[], Generator],
        observe: Callable[[Generator, int], None] | None = None,
        beat: Callable[[], None] = lambda: None,
        lost: Callable[[EngineError], None] = lambda error: None,
    ) -> None:
        self._make = make
        self._observe = observe
        self._beat = beat
        self._lost = lost
        self._failures = 0  # in a row
        self._refusal: Overloaded | None = None
        self._generator = make()
        self._arrived: queue.SimpleQueue[tuple[Work, Sink] | None] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._closing = False
        self._cancel_check = 0.0
        self._thread = threading.Thread(target=self._run, name="canvasrt-worker", daemon=True)
        self._thread.start()

    def submit(self, request: Work, sink: Sink) -> None:
        """Queue a request. Overloaded when too many wait; `sink` gets the error of one that cannot
        run."""
        if self._refusal is not None:
            raise self._refusal
        if self._arrived.qsize() + len(self._sinks) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests are already waiting", "try again later")
        if self._closing:
            raise Overloaded(*_STOPPING)
        self._arrived.put((request, sink))
        if self._refusal is not None:  # perhaps since the check above: nobody would answer it
            self._fail_arrived(self._refusal)

    def close(self) -> None:
        """Fail the requests that are still running, and end the thread."""
        self._closing = True
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            log.exception("the worker failed")
            self._give_up(_engine_error(error))

    def _work(self) -> None:
        while not self._closing and self._refusal is None:
            self._admit()
            self._beat()
            self._report()  # before a caller can hear of a request that is not counted yet
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
            try:
                arrived = self._arrived.get(timeout=IDLE_BEAT)
            except queue.Empty:
                self._beat()
                continue
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

    def _restart(self, error: EngineError) -> None:
        """Take a new generator after a failed pass, or give up."""
        self._generator.model.counters.failed_passes += 1
        self._failures += 1
        if error.fatal:
            self._give_up(error)
            return
        if self._failures >= MAX_FAILURES:
            message = f"{self._failures} passes in a row failed; the last: {error.message}"
            self._give_up(EngineError(message, error.hint, fatal=True))
            return
        self._fail_all(error)
        try:
            self._generator.abandon()
            self._generator = self._make()
        except Exception as again:
            log.exception("the generator cannot be replaced")
            self._give_up(_engine_error(again))

    def _give_up(self, error: EngineError) -> None:
        self._refusal = Overloaded(
            f"the engines have failed: {error.message}", "the server must be started again"
        )
        self._fail_all(error)
        self._fail_arrived(error)
        self._lost(error)

    def _fail_all(self, error: Exception) -> None:
        sinks = list(self._sinks.values())
        self._sinks.clear()
        for sink in sinks:
            _fail(sink, error)

    def _fail_arrived(self, error: Exception) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                arrived = self._arrived.get_nowait()
                if arrived is not None:
                    _fail(arrived[1], error)


def _engine_error(error: Exception) -> EngineError:
    """Return the error of a pass as one of the engines: its requests were checked beforehand."""
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


def _fail(sink: Sink, error: Exception) -> None:
    """Fail one request; its errors must not reach the others."""
    try:
        sink.fail(error)
    except Exception:
        log.exception("cannot send an error reply")
