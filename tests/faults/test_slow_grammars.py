"""A grammar whose endings are slow to find delays nobody else, and only so much."""

from __future__ import annotations

import threading
import time
from itertools import combinations
from string import ascii_lowercase, digits
from typing import Any

import numpy as np
import pytest

from canvasrt.runtime.answers import constrained, grammar
from canvasrt.runtime.answers.grammar import Allowance, GrammarState, SlowGrammarError, Vocabulary
from canvasrt.runtime.answers.search import near, search
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.request import Finished, Request
from tests.helpers.constrained import END, request, vocabulary
from tests.helpers.reference import Pair, demo

pytestmark = pytest.mark.acceptance

__all__ = ["demo"]
LETTERS, LONG = ascii_lowercase[:20], 100


def slow_grammar() -> str:
    """Return a grammar of 7 KB: any letters, and an ending that depends on the last one. There are
    many ways to read both."""
    rules = [
        "start: " + " | ".join(f"any x{c}" for c in LETTERS),
        "any: | any any | L",
        "L: /[a-z]/",
    ]
    for letter, pair in zip(LETTERS, combinations(digits, 2), strict=False):
        rules.append(f'x{letter}: "{letter}" ' + f"d{letter} " * LONG)
        rules.append(f"d{letter}: D{letter.upper()} | d{letter} d{letter}")
        rules.append(f"D{letter.upper()}: /[{''.join(pair)}]/")
    return "\n".join(rules)


@pytest.fixture(scope="module")
def words(demo: Pair) -> Vocabulary:
    return vocabulary(demo)


@pytest.fixture(scope="module")
def slow(words: Vocabulary) -> GrammarState:
    return grammar.compile_grammar({"type": "grammar", "grammar": slow_grammar()}, words, "g")


def looked(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """Make every search for an ending take that long on the thread's clock. Return the list that
    records them."""
    found: list[int] = []
    shortest = GrammarState.shortest
    monkeypatch.setattr(time, "thread_time", lambda: seconds * len(found))
    monkeypatch.setattr(
        GrammarState,
        "shortest",
        lambda self, most, *given: found.append(most) or shortest(self, most, *given),
    )
    return found


def scores(demo: Pair) -> np.ndarray:
    """Return log-probabilities that lead from letter to letter."""
    likely = [demo.tokenizer.encode(letter, False)[0] for letter in LETTERS]
    logs = np.full((180, demo.model.config.vocab_size), -9.0)
    logs[:, likely] = np.random.default_rng(0).random((180, len(likely)))
    return logs


def test_a_search_has_one_limit(
    demo: Pair, slow: GrammarState, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = looked(monkeypatch, 0.5)
    with pytest.raises(SlowGrammarError, match="not found within 5 s"):
        search(slow, scores(demo), 180, 180, near(slow), END, 0, Allowance(5))
    assert len(found) == 11


def test_a_search_ends_with_its_caller(
    demo: Pair, slow: GrammarState, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = looked(monkeypatch, 0.0)
    generator = Generator(demo.model)
    asked = request(demo, slow, max_new_tokens=180, max_denoising_steps=1)
    id = generator.add(asked)
    while not found:
        generator.step()
    job = next(each.job for each in generator._running)
    assert job is not None
    generator.cancel(id)
    assert [type(each) for each in generator.step()] == [Finished]
    with pytest.raises(SlowGrammarError):
        job.result(60)
    assert generator.idle


def test_slow_searches_give_up_their_places(
    demo: Pair, words: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def waiting(*arguments: Any) -> Any:
        assert go.wait(60)
        return search(*arguments)

    monkeypatch.setattr(constrained, "search", waiting)
    start = grammar.compile_grammar({"type": "regex", "regex": "[0-9]{2}"}, words, "g")
    generator = Generator(demo.model, max_batch=2)
    searching = [generator.add(request(demo, start)) for _ in range(3)]
    asked = request(demo, start)
    other = generator.add(Request(asked.prompt_token_ids, asked.params))
    ended: list[int] = []
    for _ in range(400):  # each without a pass waits for 0.05 s
        ended += [each.id for each in generator.step() if isinstance(each, Finished)]
        if ended:
            break
    assert ended == [other]
    go.set()
    while not generator.idle:
        ended += [each.id for each in generator.step() if isinstance(each, Finished)]
    assert sorted(ended[1:]) == searching
