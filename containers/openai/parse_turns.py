"""Shares the event loop fairly between connections with large bodies to parse."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Protocol

# Seconds of parsing before the event loop polls its sockets again: for all connections together, and for one.
TURN, SLICE = 0.01, 0.002


class Parsing(Protocol):
    """A connection with something to parse."""

    def read_on(self) -> None: ...


class Turns:
    """Gives connections their turns, first come, first served."""

    def __init__(self) -> None:
        self._waiting: dict[Parsing, None] = {}
        self._current: Parsing | None = None
        self._ends = 0.0  # the current one's turn
        self._due = False

    def has(self, connection: Parsing) -> bool:
        """Return whether it is a connection's turn. If not, its `read_on` is called when it is."""
        if connection is self._current and perf_counter() < self._ends:
            return True
        self._waiting[connection] = None
        self._call_next()
        return False

    def is_waiting(self, connection: Parsing) -> bool:
        """Return whether a connection waits for its turn."""
        return connection in self._waiting

    def leave(self, connection: Parsing) -> None:
        """Forget a connection."""
        self._waiting.pop(connection, None)

    def _call_next(self) -> None:
        if self._waiting and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        end = perf_counter() + TURN
        while self._waiting and (now := perf_counter()) < end:
            self._current, self._ends = next(iter(self._waiting)), min(now + SLICE, end)
            self.leave(self._current)
            self._current.read_on()
        self._current, self._due = None, False
        self._call_next()
