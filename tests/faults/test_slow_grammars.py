"""Slow searches in grammars do not delay other callers, and are limited for the caller who caused them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import numpy as np
import pytest

from canvasrt.runtime.answers import allowance, constrained, grammar
from canvasrt.runtime.answers.allowance import Allowance, SlowGrammarError
from canvasrt.runtime.answers.grammar import GrammarState, Vocabulary
from canvasrt.runtime.answers.search import near, search
from canvasrt.runtime.answers.searchers import Searchers
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.request import Finished, Request
from tests.faults.grammars import LETTERS, slow_grammar
from tests.helpers.constrained import END, request
from tests.helpers.reference import Pair

pytestmark = pytest.mark.acceptance


@pytest.fixture(scope="module")
def slow(words: Vocabulary) -> GrammarState:
    return grammar.compile_grammar({"type": "grammar", "grammar": slow_grammar()}, words, "g")


def looked(monkeypatch: pytest.MonkeyPatch, seconds: float, name: str = "shortest") -> list[int]:
    """Make every call of a method, by default of a search for an ending, take this long on the thread's fake clock.
    Return the list that records the calls."""
    found: list[int] = []
    method = getattr(GrammarState, name)
    monkeypatch.setattr(time, "thread_time", lambda: seconds * len(found))
    monkeypatch.setattr(
        GrammarState,
        name,
        lambda self, most, *given: found.append(most) or method(self, most, *given),
    )
    return found


def scores(demo: Pair) -> np.ndarray:
    """Return log-probabilities under which the search continues from letter to letter."""
    likely = [demo.tokenizer.encode(letter, False)[0] for letter in LETTERS]
    logs = np.full((180, demo.model.config.vocab_size), -9.0)
    logs[:, likely] = np.random.default_rng(0).random((180, len(likely)))
    return logs


def bias(demo: Pair) -> tuple[tuple[int, float], ...]:
    """Return a logit bias under which the model answers with letters."""
    likely = [demo.tokenizer.encode(letter, False)[0] for letter in LETTERS]
    return tuple((token, 100.0 - place % 3) for place, token in enumerate(likely))


def test_a_search_has_one_limit(
    demo: Pair, slow: GrammarState, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = looked(monkeypatch, 0.5)
    with pytest.raises(SlowGrammarError, match="not found within"):
        search(slow, scores(demo), 180, 180, near(slow), END, 0, Allowance(5))
    assert len(found) == 12  # time counts from the first search


def test_a_request_has_one_limit(
    demo: Pair, words: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canvases of a request exceed the limit together, although none does alone."""
    start = grammar.compile_grammar({"type": "regex", "regex": "[a-z]{170}"}, words, "g")
    asked = request(demo, start, max_new_tokens=180, max_denoising_steps=1)
    monkeypatch.setattr(allowance, "_REST", 0.0)
    found = looked(monkeypatch, 0.02, "advanced")
    (result,) = Generator(demo.model).run([asked])
    assert result.finish_reason == "grammar"
    assert len(result.steps) > 2
    assert 5 < 0.02 * len(found) < 5.1 + 0.32 * len(result.steps)


def test_a_known_ending_counts_too(slow: GrammarState) -> None:
    with pytest.raises(SlowGrammarError):
        slow.ends_after([1], Allowance(-1))


def test_callers_take_turns_at_searching() -> None:
    began, go, order = threading.Event(), threading.Event(), list[str]()
    searchers = Searchers(1)
    first = searchers.submit("a", lambda: (began.set(), go.wait(60)))
    assert began.wait(60)
    names = "aaabac"
    jobs = [searchers.submit(name, partial(order.append, name)) for name in names]
    jobs[0].cancel()
    go.set()
    wait([first, *jobs])
    assert "".join(order) == "bcaaa"


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


@pytest.mark.parametrize("regex", [None, "[0-9]{2}"], ids=["plain", "digits"])
def test_neighbours_are_not_slowed(
    demo: Pair, words: Vocabulary, slow: GrammarState, regex: str | None
) -> None:
    """The median time of an answer is about the same during four attacks. Without limits, it would be seconds."""
    generator = Generator(demo.model)
    attack = request(demo, slow, max_new_tokens=180, max_denoising_steps=1, logit_bias=bias(demo))
    asked = Request(attack.prompt_token_ids, request(demo, slow).params)
    if regex:
        start = grammar.compile_grammar({"type": "regex", "regex": regex}, words, "g")
        asked = request(demo, start)

    numbers = count()  # without keys, every request counts as a caller

    def add_attack() -> int:
        return generator.add(replace(attack, owner=str(next(numbers))))

    def seconds() -> float:
        asked_now = replace(asked, owner=str(next(numbers)))
        begin, id, ended = time.monotonic(), generator.add(asked_now), set[int]()
        while id not in ended:
            ended = {each.id for each in generator.step() if isinstance(each, Finished)}
            for other in ended.intersection(attackers):
                attackers[attackers.index(other)] = add_attack()
        return time.monotonic() - begin

    times: dict[int, list[float]] = {0: [], 4: []}
    attackers: list[int] = []
    for many in (0, 4) * 4:
        attackers[:] = [add_attack() for _ in range(many)]
        times[many] += [seconds() for _ in range(40)]
        for id in attackers:
            generator.cancel(id)
        while not generator.idle:
            generator.step()
    # `tests.faults.neighbours` measures a factor of two; the rest is for other load on the machine.
    assert median(times[4]) <= 4 * median(times[0])


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
    for _ in range(400):  # a step without a pass waits 0.05 s
        ended += [each.id for each in generator.step() if isinstance(each, Finished)]
        if ended:
            break
    assert ended == [other]
    go.set()
    while not generator.idle:
        ended += [each.id for each in generator.step() if isinstance(each, Finished)]
    assert sorted(ended[1:]) == searching
