"""How long-running work reports its progress."""

from collections.abc import Callable

# Called with (what is being done, units done, total units); a total of 0 means unknown.
Progress = Callable[[str, int, int], None]


def no_progress(what: str, done: int, total: int) -> None:
    """Ignore progress."""
