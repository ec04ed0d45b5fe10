"""Progress of long-running work: the work calls `report`, and its caller can listen to the reports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

# Called with (description of the work, units done, total units). If the total is 0, the length of the work is unknown;
# such work ends when different work is reported.
Progress = Callable[[str, int, int], None]


def _ignore(what: str, done: int, total: int) -> None:
    pass


_listener: ContextVar[Progress] = ContextVar("progress", default=_ignore)


@contextlib.contextmanager
def listening(progress: Progress) -> Iterator[None]:
    """Call `progress` for all reports inside the `with` block."""
    token = _listener.set(progress)
    try:
        yield
    finally:
        _listener.reset(token)


def report(what: str, done: int = 0, total: int = 0) -> None:
    """Report progress to the listener, if there is one. On another thread, call the result of `listener()` instead."""
    _listener.get()(what, done, total)


def listener() -> Progress:
    """Return the listener, for use on another thread. (Threads do not inherit the listener.)"""
    return _listener.get()


def counter(what: str, total: int) -> Callable[[int], None]:
    """Return a function that takes newly done units and reports the sum so far."""
    done = 0

    def count(units: int) -> None:
        nonlocal done
        done += units
        report(what, done, total)

    return count
