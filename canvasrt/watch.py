"""Records when running tasks began, to detect tasks that hang."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator


class Watch:
    """The running tasks of several threads. Thread-safe."""

    def __init__(self) -> None:
        self._began: dict[object, float] = {}

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count a task as running while the block runs."""
        key = object()
        self._began[key] = time.monotonic()
        try:
            yield
        finally:
            del self._began[key]

    @property
    def since(self) -> float:
        """The time on the monotonic clock when the oldest running task began; infinity if no task runs."""
        return min(list(self._began.values()), default=math.inf)
