"""Temporarily refuses callers whose requests made passes fail although the engines work."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable

from canvasrt.runtime.prefix import share_of

MOST = 3  # number of failed passes after which a caller is refused
WINDOW = 60.0  # seconds after which a failed pass no longer counts


class FailureLimiter:
    """Counts the failed passes per API key. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MOST))

    def count(self, owners: Iterable[str]) -> None:
        """Count one failed pass against these callers. Ignores callers without a key, who cannot be distinguished."""
        with self._lock:
            now = time.monotonic()
            for owner in {share_of(each) for each in owners} - {""}:
                self._failed[owner].append(now)
            for owner in [name for name, times in self._failed.items() if times[-1] < now - WINDOW]:
                del self._failed[owner]

    def refuses(self, owner: str) -> bool:
        """Return whether a caller's requests recently made too many passes fail."""
        with self._lock:
            times = self._failed.get(owner)
            return (
                times is not None and len(times) == MOST and times[0] >= time.monotonic() - WINDOW
            )
