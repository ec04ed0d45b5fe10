"""Prepares requests beside the passes: long texts, images, grammars. Callers take turns."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from canvasrt.containers.triton.worker import MAX_WAITING, Busy

PREPARING_THREADS = 2
# Grammars are compiled by recursion, whose depth callers choose: 2,700 rules in a chain overflow the usual 8 MB.
_STACK = 256 * 2**20


class _Task(NamedTuple):
    run: Callable[[], None]
    fail: Callable[[Exception], None]


class Preparing:
    """Threads that take one task of each caller in turn."""

    def __init__(self, threads: int = PREPARING_THREADS, most: int = MAX_WAITING) -> None:
        """most: tasks of all callers that may wait."""
        self._most = most
        self._queues: OrderedDict[str, deque[_Task]] = OrderedDict()
        self._waiting = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name="canvasrt-prepare", daemon=True)
            for _ in range(threads)
        ]
        before = threading.stack_size(_STACK)
        try:
            for thread in self._threads:
                thread.start()
        finally:
            threading.stack_size(before)

    @property
    def waiting(self) -> int:
        """How many tasks wait."""
        return self._waiting

    def submit(
        self, caller: str, run: Callable[[], None], fail: Callable[[Exception], None]
    ) -> None:
        """Queue a task; `fail` gets what it raises. Busy when too many wait."""
        with self._changed:
            if self._waiting >= self._most:
                raise Busy(f"{self._most} requests are already being prepared", "try again later")
            self._queues.setdefault(caller, deque()).append(_Task(run, fail))
            self._waiting += 1
            self._changed.notify()

    def close(self) -> None:
        """Drop what waits, and end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                task.run()
            except Exception as error:
                task.fail(error)

    def _next(self) -> _Task | None:
        """Return the next caller's oldest task; None once this is closed."""
        with self._changed:
            while not self._queues and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            caller, queue = self._queues.popitem(last=False)
            task = queue.popleft()
            if queue:
                self._queues[caller] = queue  # behind the others
            self._waiting -= 1
            return task
