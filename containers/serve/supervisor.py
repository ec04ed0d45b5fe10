"""Keeps Triton and the front end together: both run, or neither does, and no request is lost at the end."""

from __future__ import annotations

import threading
import time

from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.signals import StopRequest

_LOOK_EVERY = 0.2


class Supervisor:
    """One Triton and the front end over it.

    A front end that dies is replaced, since it holds nothing. When Triton dies, or a model's process,
    everything ends with an error: whatever runs the container starts it afresh, and says so.
    """

    def __init__(self, server: Server, front: FrontEnd, stop: StopRequest) -> None:
        self._server = server
        self._front = front
        self._stop = stop

    def start(self, ready_timeout: float) -> None:
        """Starts Triton; requests are taken once it is ready. CanvasError when it does not get there."""
        self._front.tell("loading")
        self._server.start()
        self._server.wait_ready(ready_timeout, self._stop.asked, self._front.check_alive)
        if not self._stop.asked.is_set():
            self._front.tell("serving")

    def watch(self) -> None:
        """Returns when it is to stop. CanvasError when Triton has ended, or the front end cannot run."""
        while not self._stop.asked.wait(_LOOK_EVERY):
            self._server.check_alive()
            self._front.check_alive()

    def stop(self, grace: float) -> bool:
        """Takes no more requests, lets those in flight finish within `grace` seconds in all, and ends
        both; False when some were cut off."""
        deadline = time.monotonic() + grace
        force = threading.Event() if self._dead() else self._stop.insisted
        if self._dead():
            force.set()  # nobody can answer what is in flight
        # First the front end, whose requests still need Triton.
        finished = self._front.stop(grace, force)
        self._server.exit_timeout = max(0.0, deadline - time.monotonic())
        return self._server.stop(force=force) and finished

    def _dead(self) -> bool:
        return not self._server.is_running
