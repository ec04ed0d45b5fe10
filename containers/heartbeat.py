"""A process's heartbeat, and the reason that it leaves when it ends."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import time
from pathlib import Path

# Two numbers of eight bytes: the time of the last beat in seconds of the monotonic clock, and the number of acknowledged
# reports.
_SIZE = 16
_BEAT, _ACKNOWLEDGED = struct.Struct("d"), struct.Struct("q")


class Heartbeat:
    """The writing side: sixteen bytes of shared memory. A beat costs a microsecond, so every step
    can afford one."""

    def __init__(self, descriptor: int) -> None:
        """Map the file behind a descriptor, which may then be closed."""
        # On a full disk, a file that has a size but no space would end the process at its first beat.
        os.posix_fallocate(descriptor, 0, _SIZE)
        memory = memoryview(mmap.mmap(descriptor, _SIZE))
        # These items are stored atomically. `struct.pack_into` stores zeros first, which a reader would take for a very old
        # beat.
        self._beat, self._acknowledged = memory[:8].cast("d"), memory[8:].cast("q")
        self._acknowledged[0] = 0
        self.beat()

    @classmethod
    def at(cls, path: Path | str) -> Heartbeat:
        """Create the file of a heartbeat. OSError when that is not possible."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            return cls(descriptor)
        finally:
            os.close(descriptor)

    def beat(self, since: float = math.inf) -> None:
        """Report progress now; or only up to `since`, when a task that is still running began."""
        # All processes of a machine share the monotonic clock.
        self._beat[0] = min(since, time.monotonic())

    def acknowledge(self) -> None:
        """Count one more report of the parent as applied."""
        self._acknowledged[0] += 1


def silence(descriptor: int) -> float | None:
    """Return the seconds since the last beat behind a descriptor; None before the first."""
    # A read may be torn, since it need not copy eight bytes at once. The later of two reads is
    # whole.
    last = max(_read(descriptor, _BEAT, 0), _read(descriptor, _BEAT, 0))
    return time.monotonic() - last if last else None


def silence_at(path: Path) -> float | None:
    """Return the seconds since the last beat in a file; None before the first."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return silence(descriptor)
    finally:
        os.close(descriptor)


def acknowledged(descriptor: int) -> int:
    """Return how many reports the process behind a descriptor has acknowledged."""
    return int(_read(descriptor, _ACKNOWLEDGED, _BEAT.size))


def _read(descriptor: int, number: struct.Struct, place: int) -> float:
    """Return a number of the file; 0 while it has none."""
    data = os.pread(descriptor, number.size, place)
    return float(number.unpack(data)[0]) if len(data) == number.size else 0


def leave_reason(path: Path, message: str, hint: str) -> None:
    """Write why this process ends. Failures to write are ignored."""
    with contextlib.suppress(OSError):
        path.write_text(f"{message}\n{hint}", encoding="utf-8")


def reason_left(path: Path) -> tuple[str, str] | None:
    """Return the message and hint of a process that has ended; None if it left none."""
    try:
        message, _, hint = path.read_text(encoding="utf-8").partition("\n")
    except OSError:
        return None
    return message, hint
