"""How long work reports where it is."""

from collections.abc import Callable

# Called with (what is being done, units done, units in all); a total of 0 means: not known.
Progress = Callable[[str, int, int], None]


def no_progress(what: str, done: int, total: int) -> None:
    """For callers that do not show any."""
