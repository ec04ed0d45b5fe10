"""Ctrl-C and SIGTERM as a request to stop, instead of an exception anywhere in the code."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class StopRequest:
    """`asked` is set by the first signal, `insisted` by the second."""

    asked: threading.Event = field(default_factory=threading.Event)
    insisted: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Takes the signals over for as long as the block runs. Main thread only."""
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        (request.insisted if request.asked.is_set() else request.asked).set()

    # nohup ignores a closed terminal; so do we then. Scripts start background jobs with Ctrl-C ignored,
    # and still stop them with it.
    taken = [n for n in _SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in taken}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
