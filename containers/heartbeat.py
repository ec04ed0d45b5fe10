"""How a process shows that it makes progress, and says why it ends."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from pathlib import Path

_BEAT = struct.Struct("d")  # seconds of the monotonic clock
_HEARD = struct.Struct("q")  # how many reports, behind the beat
_SIZE = _BEAT.size + _HEARD.size


class Heartbeat:
    """The writing side: sixteen bytes of shared memory. A beat costs a microsecond, so every step
    can afford one."""

    def __init__(self, descriptor: int) -> None:
        """Map the file behind a descriptor, which may then be closed."""
        os.ftruncate(descriptor, _SIZE)
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._heard = 0
        self.beat()

    @classmethod
    def at(cls, path: Path | str) -> Heartbeat:
        """Create the file of a heartbeat. OSError when that is not possible."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            return cls(descriptor)
        finally:
            os.close(descriptor)

    def beat(self) -> None:
        """Say that there is progress now."""
        # All processes of a machine share the monotonic clock.
        _BEAT.pack_into(self._memory, 0, time.monotonic())

    def hear(self) -> None:
        """Say that one more report of the parent has taken effect."""
        self._heard += 1
        _HEARD.pack_into(self._memory, _BEAT.size, self._heard)


def silence(descriptor: int) -> float | None:
    """Return the seconds since the last beat behind a descriptor; None before the first."""
    data = os.pread(descriptor, _BEAT.size, 0)
    return time.monotonic() - _BEAT.unpack(data)[0] if len(data) == _BEAT.size else None


def heard(descriptor: int) -> int:
    """Return how many reports have taken effect in the process that beats behind a descriptor."""
    data = os.pread(descriptor, _HEARD.size, _BEAT.size)
    return int(_HEARD.unpack(data)[0]) if len(data) == _HEARD.size else 0


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


def leave_reason(path: Path, message: str, hint: str) -> None:
    """Write why this process ends. Nothing can be done if that fails."""
    with contextlib.suppress(OSError):
        path.write_text(f"{message}\n{hint}", encoding="utf-8")


def reason_left(path: Path) -> tuple[str, str] | None:
    """Return the message and hint of a process that has ended; None if it left none."""
    try:
        message, _, hint = path.read_text(encoding="utf-8").partition("\n")
    except OSError:
        return None
    return message, hint
