"""A signal to stop takes effect whatever it interrupts."""

from __future__ import annotations

import os
import signal

from canvasrt.containers.serve.supervisor import stop_request


def test_a_signal_that_interrupts_a_wait_is_not_lost() -> None:
    with stop_request() as stop:
        # `wait` holds this lock briefly at its beginning and at its end.
        with stop.requested._cond:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested.wait(60)
        assert not stop.forced.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.forced.wait(60)
