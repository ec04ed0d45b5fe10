"""Shares the event loop fairly between connections that receive large bodies."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Protocol

TURN = 0.0005  # seconds of parsing per iteration of the event loop


class Parsing(Protocol):
    """A connection that has received data to parse."""

    def read_on(self) -> None: ...


class Turns:
    """Gives connections turns to parse, first come, first served."""

    def __init__(self) -> None:
        self._waiting: dict[Parsing, None] = {}
        self._current: Parsing | None = None
        self._ends = 0.0  # end of the current turn
        self._due = False

    def has(self, connection: Parsing) -> bool:
        """Return whether it is the connection's turn. If not, queue the connection, and call its `read_on` when its
        turn comes."""
        if connection is self._current and perf_counter() < self._ends:
            return True
        self._waiting[connection] = None
        self._call_next()
        return False

    def is_waiting(self, connection: Parsing) -> bool:
        """Return whether a connection waits for its turn."""
        return connection in self._waiting

    def leave(self, connection: Parsing) -> None:
        """Remove a connection from the queue."""
        self._waiting.pop(connection, None)

    def _call_next(self) -> None:
        if self._waiting and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._ends = perf_counter() + TURN
        while self._waiting and perf_counter() < self._ends:
            self._current = next(iter(self._waiting))
            self.leave(self._current)
            self._current.read_on()
        self._current, self._due = None, False
        self._call_next()
