"""Child processes that end with their parent (Linux)."""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(
    None, use_errno=True
)  # loaded here, so that it is not loaded between fork and exec
_PR_SET_PDEATHSIG = 1


def signal_at_death_of(parent: int, number: int) -> bool:
    """Let the kernel send this process the signal `number` when its parent dies. Return False if the parent, whose
    process id is `parent`, is already dead."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return os.getppid() == parent
