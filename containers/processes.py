"""Ends and removes what a tritonserver can leave behind: stub processes, shared memory, scratch folders."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1


def run_name() -> str:
    """A prefix for one server's shared memory and scratch folder. It says which process they
    belong to, so that another one can tell when they are left over."""
    return f"canvasrt-{_pid_namespace()}-{os.getpid()}-{secrets.token_hex(4)}-"


def die_with_parent() -> Callable[[], None]:
    """For a child before it runs its program: a SIGTERM when the parent dies, however it dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def arrange() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before that
            os._exit(1)

    return arrange


def end_group(group: int, grace: float) -> None:
    """Waits `grace` seconds for a process group to be empty, then kills what is left of it."""
    deadline = time.monotonic() + grace
    while group_members(group):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
            deadline = time.monotonic() + 5
        time.sleep(0.02)


def remove_shm(prefix: str) -> None:
    """Removes the shared memory files whose names begin with `prefix`."""
    for file in SHARED_MEMORY.glob(f"{prefix}*"):
        file.unlink(missing_ok=True)


def remove_stale() -> None:
    """Removes what servers left whose parents were killed, and whose processes are gone."""
    pattern = re.compile(rf"canvasrt-{_pid_namespace()}-(\d+)-[0-9a-f]{{8}}-")
    for folder in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        for path in folder.glob("canvasrt-*"):
            match = pattern.match(path.name)
            # A server outlives its parent for as long as its last requests take.
            if match is None or is_running(int(match[1])) or processes_of(match[0]):
                continue
            with contextlib.suppress(OSError):  # another user's
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _pid_namespace() -> str:
    """Process ids mean something within one namespace only, and containers may share /dev/shm."""
    try:
        return re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        return "0"


def processes_of(name: str) -> set[int]:
    """The processes that were started with a run's name, this one apart."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if name.encode() in file.read_bytes() and is_running(int(file.parent.name)):
                found.add(int(file.parent.name))
    return found - {os.getpid()}


def group_members(group: int) -> set[int]:
    """The processes of a process group that are not zombies."""
    # Orphans are ours to reap when we are a container's first process.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    return {
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if _state_and_group(folder) == (True, group)
    }


def is_running(pid: int) -> bool:
    """Whether a process is there, and is not a zombie."""
    return _state_and_group(Path("/proc") / str(pid))[0]


def _state_and_group(folder: Path) -> tuple[bool, int]:
    """Whether a process of /proc runs, and its group."""
    try:
        # The name in parentheses may hold spaces; state, parent and group follow it.
        state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False, 0
    return state not in "ZX", int(group)
