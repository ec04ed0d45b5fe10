"""How a process shows that it makes progress, and says why it ends."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from pathlib import Path

_FORMAT = struct.Struct("d")


class Heartbeat:
    """The writing side: eight bytes of shared memory. A beat costs a microsecond, so every step can
    afford one."""

    def __init__(self, descriptor: int) -> None:
        """Map the file behind a descriptor, which may then be closed."""
        os.ftruncate(descriptor, _FORMAT.size)
        self._memory = mmap.mmap(descriptor, _FORMAT.size)
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
        _FORMAT.pack_into(self._memory, 0, time.monotonic())


def silence(descriptor: int) -> float | None:
    """Return the seconds since the last beat behind a descriptor; None before the first."""
    data = os.pread(descriptor, _FORMAT.size, 0)
    return time.monotonic() - _FORMAT.unpack(data)[0] if len(data) == _FORMAT.size else None


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
