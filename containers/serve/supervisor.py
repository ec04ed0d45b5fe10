"""Runs Triton and the front end together: both run or neither does, and no request is lost at the
end."""

from __future__ import annotations

import threading
import time

from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.signals import StopRequest

_LOOK_EVERY = 0.2


class Supervisor:
    """Supervises one Triton and its front end.

    A front end that dies is replaced, since it holds no state. When Triton or a model's process
    dies, everything ends with an error; restarting is up to what runs the container.
    """

    def __init__(self, server: Server, front: FrontEnd, stop: StopRequest) -> None:
        self._server = server
        self._front = front
        self._stop = stop

    def start(self, ready_timeout: float) -> None:
        """Start Triton and accept requests once it is ready. CanvasError when it does not become
        ready."""
        self._front.notify("loading")
        self._server.start()
        self._server.wait_ready(ready_timeout, self._stop.requested, self._front.check_alive)
        if not self._stop.requested.is_set():
            self._front.notify("serving")

    def watch(self) -> None:
        """Wait for a request to stop. CanvasError when Triton ends, or the front end cannot be kept
        running."""
        while not self._stop.requested.wait(_LOOK_EVERY):
            self._server.check_alive()
            self._front.check_alive()

    def stop(self, grace: float) -> bool:
        """Refuse new requests, let those in flight finish within `grace` seconds, and end both
        processes.

        Return whether all finished.
        """
        deadline = time.monotonic() + grace
        force = threading.Event() if self._dead() else self._stop.forced
        if self._dead():
            force.set()  # nothing can answer the requests in flight
        # The front end first: its requests still need Triton.
        finished = self._front.stop(grace, force)
        self._server.exit_timeout = max(0.0, deadline - time.monotonic())
        return self._server.stop(force=force) and finished

    def _dead(self) -> bool:
        return not self._server.is_running
