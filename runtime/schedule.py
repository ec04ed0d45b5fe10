"""Decides which request runs next. Callers take turns, and so do the requests of one caller."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Protocol, TypeVar


class Scheduled(Protocol):
    """A request. passes: number of passes so far. turn: passes since its turn began; a long pass counts several times.
    place: sort key among the requests of one caller."""

    owner: str
    passes: int
    turn: int
    place: int

    @property
    def parks(self) -> bool:
        """Whether the request can be parked to let another one run."""

    @property
    def searches(self) -> bool:
        """Whether the request is waiting for a search, so it needs no pass now."""


Each = TypeVar("Each", bound=Scheduled)


class Schedule:
    """Weighted fair queueing (Demers, Keshav and Shenker 1989) over turns of at most `quantum` passes.

    The caller with the fewest turns so far comes first. A caller's requests run in order of arrival; a request whose
    turn is used up goes to the end of the caller's queue. A caller that is new or was idle starts with the number of
    turns of a caller that was always active. This number grows with every turn that any caller takes. So a request
    waits for at most one turn of every earlier request, no matter what arrives later.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._turns: dict[str, float] = {}  # number of turns so far, keyed by caller
        self._now = 0.0  # number of turns of a caller that was always active
        self._callers = 1
        self._places = count()

    def join(self, request: Scheduled, present: Sequence[Scheduled]) -> None:
        """Queue a new request. `present` are all waiting and running requests."""
        owners = {request.owner, *(each.owner for each in present)}
        self._callers = len(owners)
        self._turns = {
            owner: turns
            for owner, turns in self._turns.items()
            if owner in owners or turns > self._now
        }
        self._turns.setdefault(request.owner, self._now)
        request.place = next(self._places)

    def begin(self, request: Scheduled) -> None:
        """Count the beginning of a turn."""
        start, part = self._turns[request.owner], 1 / self._callers
        # New callers start at `_now`. It stays below this caller's new number of turns, so new callers go first.
        self._now = max(self._now, start, min(self._now + part, start + 1 - part))
        self._turns[request.owner] += 1

    def count(self, ran: Sequence[Scheduled], cost: int = 1) -> None:
        """Count one pass for each request in `ran`; the pass takes as long as `cost` steps. A request that continues
        after its turn, because no other request waits, begins another turn."""
        for each in ran:
            begun = max(1, -(-each.turn // self._quantum))
            each.passes += 1
            each.turn += cost
            for _ in range(begun, -(-each.turn // self._quantum)):
                self.begin(each)

    def tire(self, request: Scheduled) -> None:
        """End a request's turn early, because it needs no passes until its search ends."""
        request.turn = max(request.turn, self._quantum)

    def next(self, waiting: Sequence[Each]) -> Each:
        """Return the request whose turn it is."""
        return min(waiting, key=self._rank)

    def swap(self, waiting: Sequence[Each], running: Sequence[Each]) -> tuple[Each, Each] | None:
        """Return a waiting request, and the running request to park for it, or None if no request should be parked."""
        tired = [each for each in running if each.parks and each.turn >= self._quantum]
        if not waiting or not tired:
            return None
        best = self.next(waiting)
        worst = max(tired, key=lambda each: (each.searches, self._rank(each)))
        if self._turns[best.owner] > self._turns[worst.owner] and not worst.searches:
            return None
        worst.place = next(self._places)
        return best, worst

    def _rank(self, each: Scheduled) -> tuple[float, int]:
        return self._turns[each.owner], each.place
