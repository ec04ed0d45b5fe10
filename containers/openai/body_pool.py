"""Threads that process long bodies while the event loop serves others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
_SHORT = 1 << 16  # bytes; bodies up to this size are processed on the event loop
_MEDIUM = 1 << 20  # bytes; longer bodies share one thread


class BodyPool:
    """Processes short bodies on the event loop, and longer ones on threads, in order of arrival."""

    def __init__(self) -> None:
        self._medium = ThreadPoolExecutor(2, thread_name_prefix="canvasrt-medium")
        # Long bodies queue for one thread, so they do not delay medium ones.
        self._long = ThreadPoolExecutor(1, thread_name_prefix="canvasrt-long")

    async def run(self, size: int, work: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Return `work(*arguments)`, which processes a body of `size` bytes."""
        if size <= _SHORT:
            return work(*arguments)
        threads = self._long if size > _MEDIUM else self._medium
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    def close(self) -> None:
        """Stop processing."""
        for threads in (self._medium, self._long):
            threads.shutdown(wait=False, cancel_futures=True)
