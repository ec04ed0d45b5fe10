"""Who runs next: places in the batch are shared fairly between callers, and between the requests of
one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Scheduled(Protocol):
    """What is counted of a request: its passes in all, and since it last got a place."""

    id: int
    owner: str
    passes: int
    turn: int

    @property
    def parks(self) -> bool:
        """Whether it can make room for another."""


Each = TypeVar("Each", bound=Scheduled)


class Schedule:
    """Counts the passes of each caller and request, and chooses by them; the fewest come first.

    A caller that was idle starts at the count of the least served one, so it is neither owed for the
    past nor pushed back.
    """

    def __init__(self, quantum: int) -> None:
        """quantum: passes after which a request may have to make room."""
        self._quantum = quantum
        self._used: dict[str, float] = {}

    def join(self, owner: str, present: Sequence[Scheduled]) -> None:
        """Count a caller from now on, if it has no other request."""
        owners = {each.owner for each in present}
        self._used = {name: used for name, used in self._used.items() if name in owners}
        self._used.setdefault(owner, min(self._used.values(), default=0.0))

    def count(self, ran: Sequence[Scheduled]) -> None:
        """Count one pass of each request."""
        for each in ran:
            each.passes += 1
            each.turn += 1
            self._used[each.owner] = self._used.get(each.owner, 0.0) + 1

    def next(self, waiting: Sequence[Each]) -> Each:
        """Return the request that should run first; of equals, the one that came first."""
        return min(waiting, key=self._rank)

    def swap(self, waiting: Sequence[Each], running: Sequence[Each]) -> tuple[Each, Each] | None:
        """Return a waiting request and the one that should make room for it; None when nobody
        should."""
        if not waiting:
            return None
        tired = [each for each in running if each.parks and each.turn >= self._quantum]
        if not tired:
            return None
        best, worst = self.next(waiting), max(tired, key=self._rank)
        return (best, worst) if self._rank(best)[:2] < self._rank(worst)[:2] else None

    def _rank(self, each: Scheduled) -> tuple[float, int, int]:
        return self._used.get(each.owner, 0.0), each.passes, each.id
