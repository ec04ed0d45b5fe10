"""Threads that process long bodies while the event loop serves others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
_SHORT = 1 << 16  # bytes of a body that is processed at once
_MEDIUM = 1 << 20  # bytes of a body that is processed quickly


class BodyPool:
    """Processes bodies: short ones on the event loop, and others on threads, in order of arrival."""

    def __init__(self) -> None:
        self._medium = ThreadPoolExecutor(2, thread_name_prefix="canvasrt-medium")
        # Slow bodies wait for each other, and do not delay short ones.
        self._long = ThreadPoolExecutor(1, thread_name_prefix="canvasrt-long")

    async def run(self, size: int, work: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Return `work(*arguments)`, whose arguments come from a body of `size` bytes."""
        if size <= _SHORT:
            return work(*arguments)
        threads = self._long if size > _MEDIUM else self._medium
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    def close(self) -> None:
        """Process nothing more."""
        for threads in (self._medium, self._long):
            threads.shutdown(wait=False, cancel_futures=True)
