"""Runs Triton and the front end together: both run or neither does, and no request is lost at the
end."""

from __future__ import annotations

import threading
import time

from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.signals import StopRequest
from canvasrt.containers.serve.timeouts import STALL_TIMEOUT
from canvasrt.errors import CanvasError

_LOOK_EVERY = 0.2
_FAILED_FOR = 1.0  # seconds in which health checks see the failure
_LAST_REPLIES = 2.0  # for the front end's callers to learn of it


class Supervisor:
    """Supervises one Triton and its front end.

    A front end that dies is replaced, since it holds no state. When Triton or a model's process
    dies, or makes no progress for `stall_timeout` seconds, everything ends with an error;
    restarting is up to what runs the container.
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
        self._failed = 0.0  # when

    def start(self, ready_timeout: float) -> None:
        """Start Triton and accept requests once it is ready. CanvasError when it does not become
        ready."""
        self.front.notify("loading")
        try:
            self.server.start()
            self.server.wait_ready(ready_timeout, self._stop.requested, self.front.check_alive)
        except BaseException:
            self.server.stop(force=_at_once())
            raise
        if not self._stop.requested.is_set():
            self.front.notify("serving")
            self.front.wait_acknowledged()

    def watch(self) -> None:
        """Wait for a request to stop. CanvasError when Triton ends or hangs, or the front end cannot
        be kept running."""
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
        """Refuse new requests, let those in flight finish within `grace` seconds, and end both
        processes.

        Return whether all finished.
        """
        if self._failed:
            return self._end_failed()
        deadline = time.monotonic() + grace
        force = threading.Event() if self._dead() else self._stop.forced
        if self._dead():
            force.set()  # nothing can answer the requests in flight
        # The front end first: its requests still need Triton.
        finished = self.front.stop(grace, force)
        self.server.exit_timeout = max(0.0, deadline - time.monotonic())
        return self.server.stop(force=force) and finished

    def _end_failed(self) -> bool:
        """End Triton first, so that its callers are told, and the front end once they were."""
        finished = self.server.stop(force=_at_once())
        time.sleep(max(0.0, self._failed + _FAILED_FOR - time.monotonic()))
        return self.front.stop(_LAST_REPLIES) and finished

    def _dead(self) -> bool:
        return not self.server.is_running


def _at_once() -> threading.Event:
    event = threading.Event()
    event.set()
    return event
