"""A process that outlives a killed `canvasrt serve` and cleans up after it.

A stopping tritonserver waits for open gRPC streams without a time limit, so it must be killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time

from canvasrt.containers.processes import (
    child_environment,
    is_running,
    is_stopped,
    processes_of,
    remove_stale,
)

log = logging.getLogger(__name__)

GRACE = 6.0  # seconds for a server without open streams to exit and clean up by itself
_LEAVE = 2.0  # seconds for a dismissed guard to exit


class Guard:
    """The guard of one server, as seen from the process that it watches."""

    def __init__(self, run_name: str) -> None:
        """Start the guard. It waits until its standard input closes, which happens at the latest when this process
        exits."""
        self._run_name = run_name
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "canvasrt.containers.serve.guard", self._run_name],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def check(self) -> None:
        """Replace the guard's process if it has exited or was stopped by a signal."""
        if self._process.poll() is None and not is_stopped(self._process.pid):
            return
        log.warning(
            "the guard, which cleans up after this process, has ended or was stopped; replacing it"
        )
        self._process.kill()
        self.dismiss()
        self._process = self._start()

    def dismiss(self) -> None:
        """End the guard after its server has exited. Kill it if it does not exit by itself."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_LEAVE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(run_name: str, parent: int) -> None:
    """Wait for the parent to exit, give its server some time, then kill the server's remaining processes."""
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
