"""Tasks with known probabilities: coins, odds, wheels, draws and comparisons."""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from canvasrt.demo.tasks import Split

HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class ClosedQuestion:
    """A closed question in the form of `/v1/decisions`, and its right options: `options[outcome]` is the index of the
    option that is right for this outcome."""

    data: dict[str, Any]
    options: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One situation with possible outcomes.

    state: the description. ask: the question in a plain chat; empty if the state implies the question.
    outcomes: the possible answers of a plain chat; their probabilities add up to 1. key: decides whether the case is for
    training or held out.
    """

    task: str
    key: str
    state: str
    ask: str
    outcomes: tuple[str, ...]
    probabilities: tuple[float, ...]
    questions: tuple[ClosedQuestion, ...]

    @property
    def prompt(self) -> str:
        """The user's message in a plain chat."""
        return f"{self.state}, {self.ask}" if self.ask else self.state

    @property
    def split(self) -> Split:
        digest = hashlib.sha256(f"{self.task}:{self.key}".encode()).digest()
        return "held-out" if int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0 else "train"

    def draw(self, rng: random.Random) -> int:
        """Draw an outcome by its probability, and return its index."""
        return rng.choices(range(len(self.outcomes)), weights=self.probabilities)[0]

    def shares(self, question: ClosedQuestion) -> list[float]:
        """Return the true probability that each option of a question is right."""
        found = [0.0] * count_options(question.data)
        for outcome, option in enumerate(question.options):
            found[option] += self.probabilities[outcome]
        return found


def count_options(question: dict[str, Any]) -> int:
    """Return how many options a question has."""
    listed = question.get("choices") or question.get("levels")
    return len(listed) if listed else 2


def predicate(text: str, true: Sequence[bool]) -> ClosedQuestion:
    """Return a yes-or-no question. `true[outcome]` says whether yes is the right answer for this outcome."""
    data = {"type": "predicate", "instructions": text}
    return ClosedQuestion(data, tuple(int(not each) for each in true))


def choice(text: str, values: Sequence[str], right: Sequence[str]) -> ClosedQuestion:
    """Return a question with the options `values`. `right[outcome]` is the value that is right for this outcome."""
    data = {
        "type": "choice",
        "instructions": text,
        "choices": [{"value": value} for value in values],
    }
    return ClosedQuestion(data, tuple(values.index(each) for each in right))


def _coin(rng: random.Random) -> Case:
    """``coin 70% heads`` → heads with probability 0.7"""
    percent, sides = rng.randint(0, 100), ("heads", "tails")
    return Case(
        "coin",
        str(percent),
        f"coin {percent}% heads",
        "",
        sides,
        (percent / 100, 1 - percent / 100),
        (
            predicate("heads?", (True, False)),
            predicate("tails?", (False, True)),
            choice("which side?", rng.sample(sides, 2), sides),
        ),
    )


def _odds(rng: random.Random) -> Case:
    """``odds 3:1 for a or b`` → a with probability 0.75"""
    for_, against = rng.randint(1, 9), rng.randint(1, 9)
    names = tuple(rng.sample(string.ascii_lowercase, 2))
    share = for_ / (for_ + against)
    return Case(
        "odds",
        f"{for_}:{against}",
        f"odds {for_}:{against} for {names[0]} or {names[1]}",
        "",
        names,
        (share, 1 - share),
        (
            choice("which one?", rng.sample(names, 2), names),
            predicate(f"{names[0]}?", (True, False)),
            predicate(f"{names[1]}?", (False, True)),
        ),
    )


def _wheel(rng: random.Random) -> Case:
    """``wheel low 5 mid 3 high 2`` → low with probability 0.5"""
    names = ("low", "mid", "high")
    weights = [rng.randint(0, 9) for _ in names]
    if not any(weights):
        weights[rng.randrange(3)] = 1
    levels = [{"label": name} for name in names]
    return Case(
        "wheel",
        " ".join(map(str, weights)),
        "wheel "
        + " ".join(f"{name} {weight}" for name, weight in zip(names, weights, strict=True)),
        "",
        names,
        tuple(weight / sum(weights) for weight in weights),
        (
            ClosedQuestion(
                {"type": "score", "instructions": "how high?", "levels": levels}, (0, 1, 2)
            ),
            predicate("low?", (True, False, False)),
            predicate("high?", (False, False, True)),
        ),
    )


def _draw(rng: random.Random) -> Case:
    """``draw 1 to 10, over 7?`` → yes with probability 0.3"""
    most = rng.randint(2, 20)
    limit = rng.randint(0, most)
    ask = f"over {limit}?"
    share = (most - limit) / most
    return Case(
        "draw",
        f"{most} {limit}",
        f"draw 1 to {most}",
        ask,
        ("yes", "no"),
        (share, 1 - share),
        (
            predicate(ask, (True, False)),
            predicate(f"up to {limit}?", (False, True)),
        ),
    )


def _compare(rng: random.Random) -> Case:
    """``47 and 12, first larger?`` → yes"""
    left = rng.randint(0, 99)
    near = rng.random() < 0.4
    right = min(99, max(0, left + rng.randint(-9, 9))) if near else rng.randint(0, 99)
    larger = left > right
    return Case(
        "compare",
        f"{left} {right}",
        f"{left} and {right}",
        "first larger?",
        ("yes", "no"),
        (float(larger), float(not larger)),
        (
            predicate("first larger?", (True, False)),
            predicate("first not larger?", (False, True)),
        ),
    )


CASES: dict[str, Callable[[random.Random], Case]] = {
    "coin": _coin,
    "odds": _odds,
    "wheel": _wheel,
    "draw": _draw,
    "compare": _compare,
}


def draw_case(task: str, split: Split, rng: random.Random) -> Case:
    """Return a random case of one split."""
    while (case := CASES[task](rng)).split != split:
        pass
    return case


def cases(task: str, count: int) -> list[Case]:
    """Return `count` held-out cases, always the same. If a task has few cases, some are repeated."""
    rng = random.Random(f"{task}:held-out:0")
    return [draw_case(task, "held-out", rng) for _ in range(count)]
