"""Tasks with known probabilities and pictures: their right answers, and training examples made from them."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

from canvasrt.demo.dots import (
    COLORS,
    DOTS_PROMPTS,
    MOST_DOTS,
    RADIUS,
    draw_dots,
    questions_of,
    right_answer,
)
from canvasrt.demo.labelled import labelled
from canvasrt.demo.odds import CASES, cases, draw_case
from canvasrt.fidelity.decisions import right_of
from canvasrt.runtime.answers.layout import Ask
from tests.helpers.reference import Pair


@pytest.mark.parametrize(
    ("task", "prompt", "shares"),
    [
        ("coin", r"coin 70% heads", {"heads": 0.7, "tails": 0.3}),
        ("odds", r"odds 3:1 for \w or \w", {0: 0.75, 1: 0.25}),
        ("wheel", r"wheel low 5 mid 3 high 2", {"low": 0.5, "mid": 0.3, "high": 0.2}),
        ("draw", r"draw 1 to 10, over 7\?", {"yes": 0.3, "no": 0.7}),
        ("compare", r"47 and 12, first larger\?", {"yes": 1.0, "no": 0.0}),
    ],
)
def test_probabilities_are_those_that_the_prompt_states(
    task: str, prompt: str, shares: dict[Any, float]
) -> None:
    rng = random.Random(0)
    while not re.fullmatch(prompt, (case := CASES[task](rng)).prompt):
        pass
    found = dict(zip(case.outcomes, case.probabilities, strict=True))
    named = {case.outcomes[k] if isinstance(k, int) else k: v for k, v in shares.items()}
    assert found == pytest.approx(named)


@pytest.mark.parametrize("task", CASES)
def test_held_out_cases_are_never_trained_on(task: str) -> None:
    held_out = {each.key for each in cases(task, 300)}
    rng = random.Random(3)
    assert held_out.isdisjoint(draw_case(task, "train", rng).key for _ in range(1000))
    assert [each.prompt for each in cases(task, 5)] == [each.prompt for each in cases(task, 5)]


def test_pictures_hold_the_dots_that_they_say() -> None:
    rng = random.Random(4)
    for _ in range(60):
        dots = draw_dots(rng)
        height, width = dots.pixels.shape[:2]
        area = height * width
        off = np.abs(dots.pixels.astype(int) - np.array(COLORS[dots.color])).max(-1) < 55
        share = off.sum() / area
        assert round(share / (np.pi * RADIUS**2)) == dots.count <= MOST_DOTS
        assert right_answer(dots, DOTS_PROMPTS[0]) == dots.color
        assert right_answer(dots, DOTS_PROMPTS[1]) == str(dots.count)
        color, counted, named = questions_of(dots, rng)
        assert color.data["choices"][color.options[0]]["value"] == dots.color
        assert counted.data["choices"][counted.options[0]]["value"] == str(dots.count)
        assert (named.data["instructions"] == f"{dots.color}?") == (named.options[0] == 0)


def test_labelled_questions_are_questions() -> None:
    sums = {"add, bare", "subtract, bare"}
    assert {each["group"] for each in labelled(3, more=False)} == sums
    items = labelled(3, more=True)
    bare = {f"{name}, bare" for name in CASES}
    dots = {"pictures", "color, bare", "color of 280 tokens, bare", "dots, bare"}
    assert {each["group"] for each in items} == {*sums, *CASES, *bare, *dots}
    for item in items:
        labels = ("answer", "probabilities")
        questions = [
            {name: value for name, value in each.items() if name not in labels}
            for each in item["questions"]
        ]
        read = Ask.from_json({"questions": questions, "layout": item.get("layout", "letters")})
        for question, each in zip(read.questions, item["questions"], strict=True):
            shares = right_of(question, each, "questions[0]")
            assert len(shares) == len(question.options)
            assert sum(shares) == pytest.approx(1)


def test_training_canvases_are_those_of_reads(demo: Pair) -> None:
    """A closed question has the same prompt, canvas and slots in training as in a read."""
    pytest.importorskip("torch")
    from bench.demo.mixture import Mixture
    from bench.demo.tokenizer import build_tokenizer

    mixture = Mixture(build_tokenizer(), 32, 0)
    for task in CASES:
        case = draw_case(task, "train", mixture.rng)
        whole: dict[str, Any] = {"type": "choice", "instructions": "?"}
        whole["choices"] = [{"value": each} for each in case.outcomes]
        bare, lettered = mixture._plain(case), mixture._closed(case)
        shown = demo.tokenizer.decode(lettered.prefix, False)
        # The example asks some of the questions, in random order.
        numbered = {
            number: each.data
            for number in range(3)
            for each in case.questions
            if f"{number + 1}. {each.data['instructions']}\n" in shown
        }
        for layout, questions, example, text in (
            ("bare", [whole], bare, case.prompt),
            ("letters", [numbered[n] for n in sorted(numbered)], lettered, case.state),
        ):
            ask = Ask.from_json({"questions": questions, "layout": layout})
            messages = [{"role": "user", "content": text}]
            read = ask.request(messages, demo.model, demo.tokenizer, 0)
            (template,) = read.templates
            open_ = {
                slot.begin + offset
                for slot in template.blanks
                for offset in range(slot.labels.width)
                if len(slot.labels.allowed((), offset)) > 1
            }
            assert example.prefix == list(read.prompt_token_ids)
            assert open_ == set(example.slots.nonzero().flatten().tolist())
            fixed = [i for i in range(32) if i not in open_]
            assert [example.block[i] for i in fixed] == [template.tokens[i] for i in fixed]
