"""Threads that process long bodies and log-probabilities while the event loop serves other requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
_SHORT = 1 << 16  # bytes; bodies up to this size are processed on the event loop
_MEDIUM = 1 << 20  # bytes; bodies up to this size do not wait for longer ones
# A thread that parses holds the interpreter's lock. So before a thread starts the next queued body, it rests for this
# multiple of the CPU time that the previous body took.
REST = 3


class BodyPool:
    """Processes short bodies on the event loop, medium ones on one thread and long ones on another, in order of
    arrival."""

    def __init__(self) -> None:
        self._medium, self._long = _Lane("medium"), _Lane("long")

    async def run(self, size: int, work: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Return `work(*arguments)`, which processes a body of `size` bytes."""
        if size <= _SHORT:
            return work(*arguments)
        return await (self._long if size > _MEDIUM else self._medium).run(work, *arguments)

    def close(self) -> None:
        """Stop the threads. Bodies that still wait are dropped."""
        for lane in (self._medium, self._long):
            lane.thread.shutdown(wait=False, cancel_futures=True)


class _Lane:
    def __init__(self, name: str) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"canvasrt-{name}")
        self._waiting = 0
        self._rests_until = 0.0

    async def run(self, work: Callable[..., ResultT], *arguments: Any) -> ResultT:
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.thread, self._work, work, *arguments)
        finally:
            self._waiting -= 1

    def _work(self, work: Callable[..., ResultT], *arguments: Any) -> ResultT:
        if self._waiting > 1:
            time.sleep(max(0.0, self._rests_until - time.monotonic()))
        begin = time.thread_time()
        try:
            return work(*arguments)
        finally:
            self._rests_until = time.monotonic() + REST * (time.thread_time() - begin)
