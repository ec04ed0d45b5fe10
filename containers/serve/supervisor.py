"""Starts and stops Triton and the front end in the right order, and watches them in between. Ctrl-C and SIGTERM become
a request to stop, instead of exceptions that could occur anywhere in the code."""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from canvasrt.containers.names import STALL_TIMEOUT
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import AT_ONCE, Server
from canvasrt.errors import CanvasError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_EVERY = 0.2
_FAILED_FOR = 1.0  # seconds during which health checks report the failure
_LAST_REPLIES = 2.0  # seconds for the front end to send the error to its callers


@dataclass(frozen=True)
class StopRequest:
    """A request to stop. The first signal sets `requested`, the second `forced`."""

    requested: threading.Event = field(default_factory=threading.Event)
    forced: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Handle the signals inside the `with` block. Only the main thread can call this."""
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        noted = request.forced if request.requested.is_set() else request.requested
        # Set the events on another thread, because the interrupted code could hold an event's lock.
        _thread.start_new_thread(noted.set, ())

    # Keep ignoring SIGHUP under nohup. But handle SIGINT even if it is ignored: shells make background jobs of scripts
    # ignore SIGINT, although scripts stop such jobs with SIGINT.
    taken = [n for n in _SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in taken}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Supervisor:
    """Supervises one Triton server and its front end: both run, or neither does.

    A front end that dies is replaced, since it has no state. If Triton or a model's process dies, or makes no progress
    for `stall_timeout` seconds, everything stops with an error. The container's restart policy then restarts the
    container.
    """

    def __init__(
        self,
        server: Server,
        front: FrontEnd,
        stop: StopRequest,
        stall_timeout: float = STALL_TIMEOUT,
    ) -> None:
        self.server = server
        self.front = front
        self._stop = stop
        self._stall_timeout = stall_timeout
        self._failed = 0.0  # time of the failure

    def start(self) -> None:
        """Start Triton, and accept requests once it is ready. Raises CanvasError if it does not become ready."""
        self.front.notify("loading")
        try:
            self.server.start()
            self.server.wait_ready(self._stop.requested, self.front.check_alive)
        except BaseException:
            self.server.stop(force=AT_ONCE)
            raise
        if not self._stop.requested.is_set():
            self.front.notify("serving", self.server.evidence)
            self.front.wait_acknowledged()

    def watch(self) -> None:
        """Wait until a stop is requested. Raises CanvasError if Triton exits or hangs, or if the front end dies too
        often."""
        try:
            while not self._stop.requested.wait(_LOOK_EVERY):
                self.server.check_alive()
                self.server.check_progress(self._stall_timeout)
                self.front.check_alive()
        except CanvasError:
            self.front.notify("failed")
            self._failed = time.monotonic()
            raise

    def stop(self, grace: float) -> bool:
        """Refuse new requests, let those in flight finish within `grace` seconds, and stop both processes.

        Return whether all requests finished.
        """
        if self._failed:
            # Stop Triton before the front end, so that callers get Triton's errors.
            finished = self.server.stop(force=AT_ONCE)
            time.sleep(max(0.0, self._failed + _FAILED_FOR - time.monotonic()))
            return self.front.stop(_LAST_REPLIES) and finished
        deadline = time.monotonic() + grace
        # A dead Triton cannot answer requests in flight.
        force = self._stop.forced if self.server.is_running else AT_ONCE
        # Drain the front end first, because its requests still need Triton.
        finished = self.front.drain(grace, force)
        if not finished:  # Triton stops first, so that callers get its errors
            self.server.stop(force=AT_ONCE)
        self.front.stop(_LAST_REPLIES)
        if not finished:
            return False
        self.server.exit_timeout = max(0.0, deadline - time.monotonic())
        return self.server.stop(force=force) and finished
