"""Files in which a process reports that it makes progress, and why it exits."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import time
from pathlib import Path

# Two 8-byte numbers: the monotonic time of the last beat in seconds, and the number of acknowledged reports.
_SIZE = 16
_BEAT, _ACKNOWLEDGED = struct.Struct("d"), struct.Struct("q")


class Heartbeat:
    """Writes a heartbeat to sixteen bytes of shared memory. A beat takes a microsecond, so every step can beat."""

    def __init__(self, descriptor: int) -> None:
        """Map the descriptor's file to memory. The descriptor can be closed afterwards."""
        # Allocate disk space. On a full disk, writing to a sparse file would kill the process at its first beat.
        os.posix_fallocate(descriptor, 0, _SIZE)
        memory = memoryview(mmap.mmap(descriptor, _SIZE))
        # Items of this memoryview are stored atomically. `struct.pack_into` first stores zeros, which would read as a
        # very old beat.
        self._beat, self._acknowledged = memory[:8].cast("d"), memory[8:].cast("q")
        self._acknowledged[0] = 0
        self.beat()

    @classmethod
    def at(cls, path: Path | str) -> Heartbeat:
        """Create a heartbeat's file. Raises OSError if that fails."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            return cls(descriptor)
        finally:
            os.close(descriptor)

    def beat(self, since: float = math.inf) -> None:
        """Report progress up to now. If a task that began at `since` is still running, report only up to `since`."""
        # The monotonic clock is the same for all processes of a machine.
        self._beat[0] = min(since, time.monotonic())

    def acknowledge(self) -> None:
        """Tell the parent that one more of its reports has been applied."""
        self._acknowledged[0] += 1


def silence(descriptor: int) -> float | None:
    """Return the seconds since the last beat in a descriptor's file; None before the first beat."""
    # A read can return a half-written number, so this reads twice and uses the larger result.
    last = max(_read(descriptor, _BEAT, 0), _read(descriptor, _BEAT, 0))
    return time.monotonic() - last if last else None


def silence_at(path: Path) -> float | None:
    """Return the seconds since the last beat in a file; None before the first beat."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return silence(descriptor)
    finally:
        os.close(descriptor)


def acknowledged(descriptor: int) -> int:
    """Return how many of the parent's reports are acknowledged in a descriptor's file."""
    return int(_read(descriptor, _ACKNOWLEDGED, _BEAT.size))


def _read(descriptor: int, number: struct.Struct, place: int) -> float:
    """Return the number at `place` in the file; 0 if it is not written yet."""
    data = os.pread(descriptor, number.size, place)
    return float(number.unpack(data)[0]) if len(data) == number.size else 0


def leave_reason(path: Path, message: str, hint: str) -> None:
    """Write the reason why this process exits. Failures to write are ignored."""
    with contextlib.suppress(OSError):
        path.write_text(f"{message}\n{hint}", encoding="utf-8")


def reason_left(path: Path) -> tuple[str, str] | None:
    """Return the message and hint that an exited process left; None if it left none."""
    try:
        message, _, hint = path.read_text(encoding="utf-8").partition("\n")
    except OSError:
        return None
    return message, hint
