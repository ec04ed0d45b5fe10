"""Detects a server that makes no progress: stopped processes, endless passes, missing answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from canvasrt.containers.heartbeat import silence_at
from canvasrt.containers.processes import is_stopped

# Seconds that a process can be stopped by a signal before the server counts as stalled.
STOPPED_TIMEOUT = 5.0
_PROBE_EVERY = 5.0


class StallWatch:
    """Watches one server for stalls. `probe` returns whether Triton answers."""

    def __init__(self, heartbeat: Path, probe: Callable[[], bool]) -> None:
        self._heartbeat = heartbeat
        self._probe = probe
        self._stopped_since: float | None = None
        self._answered = time.monotonic()

    def stalled(self, processes: Iterable[int], limit: float) -> str:
        """Return a description of how the server hangs; empty if it does not. `limit` is in seconds."""
        now = time.monotonic()
        if not any(is_stopped(pid) for pid in processes):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > STOPPED_TIMEOUT:
            return f"was stopped by a signal for {STOPPED_TIMEOUT:g} s"
        quiet = silence_at(self._heartbeat)
        if quiet is not None and quiet > limit:
            return f"made no progress for {limit:g} s"
        # Triton's own threads can hang too.
        if now - self._answered > _PROBE_EVERY and self._stopped_since is None:
            if self._probe():
                self._answered = time.monotonic()
            elif now - self._answered > max(limit, _PROBE_EVERY):
                return f"did not answer for {limit:g} s"
        return ""
