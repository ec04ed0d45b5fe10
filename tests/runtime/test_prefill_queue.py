"""The queue of tokens to encode, a list of chunks with a cursor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from canvasrt.runtime.prefill_queue import PrefillQueue

MODEL: Any = SimpleNamespace(prefill_chunk=4, config=None)


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


def test_after_a_dropped_trial_nothing_is_encoded_again() -> None:
    queue = PrefillQueue(range(3), (), MODEL)
    queue.advance()
    queue.add_trial(np.arange(20, 26), lambda hidden: True)
    queue.advance()
    queue.drop_trial()
    assert queue.empty
    assert not queue.returning
