"""Shares the event loop between connections that have much to parse."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

# Seconds of parsing between two looks of the event loop at its sockets: of all connections, and of one.
TURN, SLICE = 0.01, 0.002


class Parsing(Protocol):
    """A connection with something to parse."""

    def proceed(self) -> None: ...


class Turns:
    """Gives connections their turns, first come, first served."""

    def __init__(self) -> None:
        self._waiting: dict[Parsing, None] = {}
        self._current: Parsing | None = None
        self._ends = self._slice_ends = 0.0
        self._begun = False

    def take(self, connection: Parsing) -> bool:
        """Return whether a connection may parse one more piece now. If not, its `proceed` is called
        when it may."""
        if connection in self._waiting:
            return False
        if not self._begun:
            self._begin()
        now = time.perf_counter()
        if connection is not self._current:
            self._current, self._slice_ends = connection, min(self._ends, now + SLICE)
        if now < self._slice_ends:
            return True
        self._waiting[connection] = None
        return False

    def waits(self, connection: Parsing) -> bool:
        """Return whether a connection waits for its turn."""
        return connection in self._waiting

    def leave(self, connection: Parsing) -> None:
        """Forget a connection."""
        self._waiting.pop(connection, None)
        if self._current is connection:
            self._current = None

    def _begin(self) -> None:
        self._begun = True
        self._ends = time.perf_counter() + TURN
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._begun, self._current = False, None
        if not self._waiting:
            return
        self._begin()
        while self._waiting and time.perf_counter() < self._ends:
            connection = next(iter(self._waiting))
            self.leave(connection)
            connection.proceed()
