"""A process of its own that outlives a killed `canvasrt serve`, and clears up after it.

Told to stop, tritonserver waits for open gRPC streams without a limit; somebody has to end that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from canvasrt.containers.processes import is_running, processes_of, remove_stale

GRACE = 6.0  # for a server without open streams, which ends by itself and clears up better


def start_guard(run_name: str) -> subprocess.Popen[bytes]:
    """Starts the guard of one server. It waits until its standard input is closed, which the end of
    this process does too, however it comes."""
    return subprocess.Popen(
        [sys.executable, "-m", "canvasrt.containers.serve.guard", run_name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def dismiss(guard: subprocess.Popen[bytes]) -> None:
    """Ends a guard whose server is gone already."""
    if guard.stdin is not None:
        guard.stdin.close()
    guard.wait()


def main(run_name: str, parent: int) -> None:
    """Waits for the parent's end, then gives its server a while and kills what is left of it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    if is_running(parent) and not processes_of(run_name):
        return
    deadline = time.monotonic() + GRACE
    while left := processes_of(run_name):
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    remove_stale()


if __name__ == "__main__":
    main(sys.argv[1], os.getppid())
