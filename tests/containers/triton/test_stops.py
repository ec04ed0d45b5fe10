"""The text ends before the first stop string, and no part of a stop string is shown, however the text is divided."""

from __future__ import annotations

import itertools
import random

import pytest

from canvasrt.containers.triton.stops import StopCutter


def cut(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    cutter = StopCutter(stops)
    shown = [cutter.put(piece, final=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    return shown, cutter.found


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "found"),
    [
        (["one two"], [], ["one two"], None),
        (["one two"], ["two"], ["one "], "two"),
        (["one t", "wo three"], ["two"], ["one ", ""], "two"),
        (["one t", "en"], ["two"], ["one ", "ten"], None),
        (["one tw"], ["two"], ["one tw"], None),  # the text ends, so there is no stop string
        (["aab", "aac"], ["aac"], ["aab", ""], "aac"),
        (["a", "a", "b"], ["aab"], ["", "", ""], "aab"),
        (["xaa", "ab"], ["aab"], ["x", "a"], "aab"),
        (["stop", "more"], ["stop"], ["", ""], "stop"),
        (["abcd"], ["cd", "b"], ["a"], "b"),
        (["abcd"], ["bc", "bcd"], ["a"], "bc"),  # "bc" is complete first
        (["abcd"], ["c", "bc"], ["a"], "bc"),
    ],
)
def test_the_text_ends_before_a_stop_string(
    pieces: list[str], stops: list[str], shown: list[str], found: str | None
):
    assert cut(pieces, stops) == (shown, found)


def test_any_division_gives_the_same_text():
    chance = random.Random(5)
    for _ in range(300):
        text = "".join(chance.choices("ab", k=12))
        stops = ["".join(chance.choices("ab", k=chance.randint(1, 4))) for _ in range(2)]
        expected = cut(list(text), stops)[0]
        marks = sorted(chance.sample(range(13), 3))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *marks, 12])]
        assert "".join(cut(pieces, stops)[0]) == "".join(expected), (text, stops, pieces)
        assert not any(stop in "".join(expected) for stop in stops)
