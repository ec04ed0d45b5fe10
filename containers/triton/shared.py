"""Deduplicates work that several requests need."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Shared(Generic[Value]):
    """A thread-safe cache of the most recently used results."""

    def __init__(self, kept: int, most: int, size: Callable[[Value], int]) -> None:
        """Keep at most `kept` results, whose sizes add up to at most `most`. `size` returns a result's size."""
        self._kept, self._most, self._size = kept, most, size
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Future[Value]] = OrderedDict()

    def get(self, key: bytes, work: Callable[[], Value]) -> Value:
        """Return the result cached for `key`. If there is none, run `work`, once for all concurrent callers. If `work`
        raises an exception, all these callers get it, and nothing is cached."""
        with self._lock:
            future = self._known.get(key)
            mine = future is None
            if future is None:
                future = self._known[key] = Future()
            self._known.move_to_end(key)
        if mine:
            try:
                future.set_result(work())
            except BaseException as error:  # so that other callers do not wait forever
                future.set_exception(error)
            self._forget()
        return future.result()

    def drop(self, key: bytes, value: Value) -> None:
        """Remove a result, unless it was already replaced."""
        with self._lock:
            future = self._known.get(key)
            if future is not None and future.done() and future.result() is value:
                del self._known[key]

    def _forget(self) -> None:
        with self._lock:
            done = {key: each for key, each in self._known.items() if each.done()}
            for key, each in done.items():
                if each.exception() is not None:
                    del self._known[key]
            sizes = {key: self._size(done[key].result()) for key in self._known if key in done}
            for key in list(sizes):
                if len(self._known) <= self._kept and sum(sizes.values()) <= self._most:
                    return
                del self._known[key], sizes[key]
