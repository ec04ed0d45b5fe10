"""The queue of tokens to encode: one list of chunks, and a cursor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from canvasrt.runtime.prefill_queue import PrefillQueue

MODEL: Any = SimpleNamespace(prefill_chunk=4, config=None)


def drain(queue: PrefillQueue) -> list[list[int]]:
    """Encode everything; return the chunks' tokens."""
    found = []
    while not queue.empty:
        found.append(queue.input(None).tokens.tolist())
        queue.advance()
    return found


def test_a_prompt_then_its_blocks_and_all_of_them_again() -> None:
    queue = PrefillQueue(range(6), (), MODEL)
    assert drain(queue) == [[0, 1, 2, 3], [4, 5]]
    queue.add(np.arange(10, 16))
    assert drain(queue) == [[10, 11, 12, 13], [14, 15]]
    queue.rewind()
    assert queue.returning
    assert drain(queue) == [[0, 1, 2, 3], [4, 5], [10, 11, 12, 13], [14, 15]]
    assert not queue.returning


def test_only_the_prompt_is_cacheable_and_it_is_counted_once() -> None:
    queue = PrefillQueue(range(6), (), MODEL)
    assert [chunk.size for chunk in queue.cacheable()] == [4, 2]
    queue.skip(1)
    assert [chunk.size for chunk in queue.cacheable()] == [2]
    queue.skip(1)
    queue.add(np.arange(3))
    assert queue.cacheable() == []
    queue.rewind()
    queue.skip(2)
    assert queue.cached == 6


def test_what_is_watched_is_always_encoded() -> None:
    watched: list[np.ndarray] = []
    queue = PrefillQueue(range(6), (), MODEL, lambda hidden: not watched.append(hidden))
    assert [chunk.size for chunk in queue.cacheable()] == [4]
    queue.advance()
    assert queue.input(None).keep is not None


def test_a_trial_is_kept_as_a_block_or_dropped() -> None:
    queue = PrefillQueue(range(3), (), MODEL)
    drain(queue)
    for kept in (False, True):
        queue.add_trial(np.arange(20, 26), lambda hidden: True)
        assert queue.input(None).whole
        assert drain(queue) == [[20, 21, 22, 23, 24, 25]]
        if kept:
            queue.keep_trial()
        else:
            queue.drop_trial()
        assert queue.empty
    queue.rewind()
    assert drain(queue) == [[0, 1, 2], [20, 21, 22, 23, 24, 25]]
