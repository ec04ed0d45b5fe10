"""Limits the CPU time of answers under a grammar."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from canvasrt.errors import CanvasError

EAGER = 0.1  # CPU seconds after which slow work gives way to other threads
# llguidance holds the interpreter's lock during a call, and other threads hardly get the lock between calls. So after
# each millisecond, slow work rests for three.
_SLICE, _REST = 0.001, 3.0


class SlowGrammarError(CanvasError):
    """Following a grammar takes too long."""


class Allowance:
    """A limit on the CPU time of the thread that calls `check`. The limit is also reached when `stopped` returns True.

    Waiting does not count, so a busy machine refuses no more work than an idle one. A thread that used up `eager`
    seconds gives way to other threads: from then on it runs only a quarter of the time.
    """

    def __init__(
        self,
        seconds: float,
        stopped: Callable[[], bool] = lambda: False,
        eager: float = math.inf,
    ) -> None:
        self._seconds, self._stopped, self._eager = seconds, stopped, eager
        self._begin: float | None = None
        # `check` reads the thread's clock only after this time, because one reading takes longer than many checks.
        self._next = 0.0

    @property
    def left(self) -> float:
        """The seconds that are left. Read this only on the thread that calls `check`."""
        return self._seconds - (0.0 if self._begin is None else time.thread_time() - self._begin)

    def earn(self, seconds: float) -> None:
        """Allow this many more seconds."""
        self._seconds += seconds
        self._eager += seconds

    def check(self) -> None:
        """Raise SlowGrammarError once the limit is reached."""
        if (wall := time.monotonic()) < self._next:
            return
        now, self._next = time.thread_time(), wall + _SLICE / 4
        if self._begin is None:
            self._begin = now
        used = now - self._begin
        if self._stopped() or used > self._seconds:
            raise SlowGrammarError(
                f"its shortest answer was not found within {self._seconds:g} s", "simplify it"
            )
        if used > self._eager + _SLICE:
            time.sleep(_REST * (used - self._eager))
            self._eager = used
