"""Progress of long-running work: the work calls `report`, and its caller may listen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

# Called with (what is being done, units done, total units); a total of 0 is a stage of
# unknown length, which ends when other work is reported.
Progress = Callable[[str, int, int], None]


def _ignore(what: str, done: int, total: int) -> None:
    pass


_listener: ContextVar[Progress] = ContextVar("progress", default=_ignore)


@contextlib.contextmanager
def listening(progress: Progress) -> Iterator[None]:
    """Call `progress` for everything that is reported inside the block."""
    token = _listener.set(progress)
    try:
        yield
    finally:
        _listener.reset(token)


def report(what: str, done: int = 0, total: int = 0) -> None:
    """Report progress to the listener, if there is one. In a thread of its own, call `listener()`'s result instead."""
    _listener.get()(what, done, total)


def listener() -> Progress:
    """Return the listener, to hand to a thread: threads do not inherit it."""
    return _listener.get()


def counter(what: str, total: int) -> Callable[[int], None]:
    """Return a function that takes the units just done and reports the sum so far."""
    done = 0

    def count(units: int) -> None:
        nonlocal done
        done += units
        report(what, done, total)

    return count
