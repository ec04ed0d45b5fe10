"""Knows since when something has been under way, so that what hangs can be noticed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator


class Watch:
    """What threads are busy with. May be used from several threads."""

    def __init__(self) -> None:
        self._began: dict[object, float] = {}

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Be busy with one thing in this context."""
        key = object()
        self._began[key] = time.monotonic()
        try:
            yield
        finally:
            del self._began[key]

    @property
    def since(self) -> float:
        """When the oldest of these things began, on the monotonic clock; infinity if there is none."""
        return min(list(self._began.values()), default=math.inf)
