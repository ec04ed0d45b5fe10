"""Cleans up tritonserver's stub processes, shared memory and scratch folders."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from canvasrt.children import signal_at_death_of
from canvasrt.containers.names import SECRETS
from canvasrt.staging import is_locked

SHARED_MEMORY = Path("/dev/shm")
# A secret that only the front end and the models inherit from this process.
CALLER_SECRET = secrets.token_hex(16)


def run_name() -> str:
    """Return a prefix for the names of one server's shared memory and scratch folder.

    It contains the owner's process id. If there is no lock, other servers recognize leftovers by this id.
    """
    return f"canvasrt-{_pid_namespace()}-{os.getpid()}-{secrets.token_hex(4)}-"


def child_environment() -> dict[str, str]:
    """Return this process's environment without secrets."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}


def die_with_parent() -> Callable[[], None]:
    """Return a preexec_fn for Popen that makes the child get SIGTERM when its parent dies."""
    parent = os.getpid()

    def arrange() -> None:
        if not signal_at_death_of(parent, signal.SIGTERM):
            os._exit(1)

    return arrange


def end_group(group: int, grace: float) -> None:
    """Wait up to `grace` seconds for a process group to exit, then kill what remains."""
    deadline = time.monotonic() + grace
    while group_members(group):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
            deadline = time.monotonic() + 5
        time.sleep(0.02)


@contextlib.contextmanager
def holding(name: str) -> Iterator[int]:
    """Mark a server's files as in use; at the end, remove its shared memory. Yields a descriptor: the files stay in use
    as long as any process that inherited the descriptor runs."""
    lock = SHARED_MEMORY / f"{name}lock"
    # Until the lock exists, the process id in its name protects this file.
    new = SHARED_MEMORY / f"{name}new"
    held = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        new.rename(lock)
        yield held
    finally:
        os.close(held)
        remove_shm(name)


def remove_shm(prefix: str) -> None:
    """Remove the shared memory files whose names start with `prefix`."""
    for file in SHARED_MEMORY.glob(f"{prefix}*"):
        file.unlink(missing_ok=True)


def protect_shm(prefix: str) -> None:
    """Make the shared memory files whose names start with `prefix` unreadable for other users. Before the first
    request, Triton's Python backend creates them readable for all users, regardless of the umask."""
    for file in SHARED_MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # already deleted
            if file.is_file():
                file.chmod(0o600)


def remove_stale() -> None:
    """Remove the shared memory and folders of dead servers whose parents were killed before they could clean up.

    A lock that nobody holds shows that a server is dead, even a server in another container. In Kubernetes, /dev/shm
    outlives a killed container; its server had another process-id namespace, or had the process id that ours has now.
    """
    pattern = re.compile(r"canvasrt-(\d+)-(\d+)-[0-9a-f]{8}-")
    for folder in (Path(tempfile.gettempdir()), Path("/tmp"), SHARED_MEMORY):  # remove locks last
        for path in sorted(folder.glob("canvasrt-*"), key=lambda each: each.name.endswith("lock")):
            if (match := pattern.match(path.name)) is None:
                continue
            lock = SHARED_MEMORY / f"{match[0]}lock"
            has_lock = lock.exists()  # before `is_locked`, since the lock may appear in between
            if is_locked(lock):
                continue
            # A server can outlive its parent until it has finished its last requests.
            if not has_lock and (
                match[1] != _pid_namespace() or is_running(int(match[2])) or processes_of(match[0])
            ):
                continue
            with contextlib.suppress(OSError):  # it belongs to another user
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not processes_of("tritonserver"):  # a running tritonserver removes its own folders
        for path in Path("/tmp").glob("python_env_*"):
            with contextlib.suppress(OSError):  # it belongs to another user, or is not empty
                path.rmdir()


def _pid_namespace() -> str:
    """Return the id of the process-id namespace. It differs between containers that share /dev/shm."""
    try:
        return re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        return "0"


def processes_of(name: str) -> set[int]:
    """Return the processes whose command line contains `name`, except this one."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if name.encode() in file.read_bytes() and is_running(int(file.parent.name)):
                found.add(int(file.parent.name))
    return found - {os.getpid()}


def group_members(group: int) -> set[int]:
    """Return the processes of a group that are not zombies."""
    # As a container's init, this process must reap orphans.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    found = (_state_of(folder) for folder in Path("/proc").glob("[0-9]*"))
    return {each.pid for each in found if each.running and each.group == group}


def children(parent: int) -> tuple[set[int], set[int]]:
    """Return two sets of a process's children: the running children, and the zombies."""
    found = [_state_of(folder) for folder in Path("/proc").glob("[0-9]*")]
    running, dead = (
        {each.pid for each in found if each.parent == parent and each.running is state}
        for state in (True, False)
    )
    return running, dead


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return _state_of(Path("/proc") / str(pid)).running


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or a debugger."""
    return _state_of(Path("/proc") / str(pid)).state in ("T", "t")


class _State(NamedTuple):
    pid: int
    state: str = "X"  # a process that does not exist has ended
    parent: int = 0
    group: int = 0

    @property
    def running(self) -> bool:
        return self.state not in ("Z", "X")


def _state_of(folder: Path) -> _State:
    """Return a process's state from /proc."""
    pid = int(folder.name)
    try:
        # The name in parentheses may contain spaces; state, parent and group follow it.
        state, parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return _State(pid)
    return _State(pid, state, int(parent), int(group))
