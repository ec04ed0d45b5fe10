"""A process that outlives a killed `canvasrt serve` and cleans up after it.

When it stops, tritonserver waits for open gRPC streams without a limit, so something must end it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from canvasrt.containers.processes import (
    child_environment,
    is_running,
    processes_of,
    remove_stale,
)

GRACE = 6.0  # a server without open streams ends by itself, and cleans up better


def start_guard(run_name: str) -> subprocess.Popen[bytes]:
    """Start the guard of one server. It waits until its standard input closes, which also happens
    however this process ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "canvasrt.containers.serve.guard", run_name],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def dismiss(guard: subprocess.Popen[bytes]) -> None:
    """End a guard whose server has already ended."""
    if guard.stdin is not None:
        guard.stdin.close()
    guard.wait()


def main(run_name: str, parent: int) -> None:
    """Wait for the parent to end, give its server some time, then kill what is left of it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    if is_running(parent) and not processes_of(run_name):
        return
    deadline = time.monotonic() + GRACE
    while remaining := processes_of(run_name):
        if time.monotonic() > deadline:
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    remove_stale()


if __name__ == "__main__":
    main(sys.argv[1], os.getppid())
