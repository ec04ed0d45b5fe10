"""Converts Ctrl-C and SIGTERM to a request to stop, instead of exceptions that could occur anywhere in the code."""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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

    # Keep ignoring SIGHUP under nohup. But handle SIGINT even if it is ignored: a shell makes the background jobs of a
    # script ignore SIGINT, although scripts stop such jobs with SIGINT.
    taken = [n for n in _SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in taken}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
