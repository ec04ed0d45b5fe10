"""Threads for what long bodies take, while the event loop serves others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

MadeT = TypeVar("MadeT")
_SHORT = 1 << 16  # bytes of a body that is processed at once
_MEDIUM = 1 << 20  # of one that is soon processed


class Aside:
    """Processes bodies: short ones on the event loop, and others on threads, in the order they came."""

    def __init__(self) -> None:
        self._medium = ThreadPoolExecutor(2, thread_name_prefix="canvasrt-medium")
        # Those that take a second wait for each other only.
        self._long = ThreadPoolExecutor(1, thread_name_prefix="canvasrt-long")

    async def run(self, size: int, work: Callable[..., MadeT], *arguments: Any) -> MadeT:
        """Return what `work` makes of its arguments, which come from a body of `size` bytes."""
        if size <= _SHORT:
            return work(*arguments)
        threads = self._long if size > _MEDIUM else self._medium
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    def close(self) -> None:
        """Process nothing more."""
        for threads in (self._medium, self._long):
            threads.shutdown(wait=False, cancel_futures=True)
