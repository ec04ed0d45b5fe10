"""Prepares long texts, images and grammars on threads while passes run. Callers take turns."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from canvasrt.watch import Watch

log = logging.getLogger(__name__)

PREPARING_THREADS = 2
# Stack size of a thread, in bytes. Grammars are compiled recursively, to a depth that callers choose: a chain of 2,700
# rules overflows the usual 8 MB.
STACK = 256 * 2**20


class _Task(NamedTuple):
    run: Callable[[], None]
    fail: Callable[[BaseException], None]


class Preparing:
    """Threads that run tasks. Callers take turns of one task each. The submitting code must limit the number of
    waiting tasks."""

    def __init__(self, threads: int = PREPARING_THREADS) -> None:
        self.watch = Watch()
        self._queues: OrderedDict[str, deque[_Task]] = OrderedDict()
        self._waiting = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name="canvasrt-prepare", daemon=True)
            for _ in range(threads)
        ]
        before = threading.stack_size(STACK)
        try:
            for thread in self._threads:
                thread.start()
        finally:
            threading.stack_size(before)

    @property
    def waiting(self) -> int:
        """Number of waiting tasks."""
        return self._waiting

    def submit(
        self, caller: str, run: Callable[[], None], fail: Callable[[BaseException], None]
    ) -> None:
        """Queue a task. If `run` raises an exception, `fail` is called with it."""
        with self._changed:
            self._queues.setdefault(caller, deque()).append(_Task(run, fail))
            self._waiting += 1
            self._changed.notify()

    def close(self) -> None:
        """Drop waiting tasks, and end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                with self.watch.busy():
                    task.run()
            # The thread must survive, or other tasks would wait forever.
            except BaseException as error:
                try:
                    task.fail(error)
                except Exception:
                    log.exception("cannot fail a task")

    def _next(self) -> _Task | None:
        """Return the next caller's oldest task; None after `close`."""
        with self._changed:
            while not self._queues and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            caller, queue = self._queues.popitem(last=False)
            task = queue.popleft()
            if queue:
                self._queues[caller] = queue  # the caller moves to the end of the queue
            self._waiting -= 1
            return task
