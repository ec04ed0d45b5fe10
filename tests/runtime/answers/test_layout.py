"""The layout of questions on canvases, and the demo model's answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.decision import DecisionRequest, DecisionResult
from canvasrt.runtime.answers.layout import Ask, letters, with_questions
from canvasrt.runtime.answers.questions import read_questions
from canvasrt.runtime.generator import Generator
from tests.helpers.reference import Pair

PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "Is it?"}


def choice(*values: str) -> dict[str, Any]:
    return {"type": "choice", "instructions": "?", "choices": [{"value": each} for each in values]}


def request(pair: Pair, text: str, **data: Any) -> tuple[Ask, DecisionRequest]:
    ask = Ask.from_json(data)
    messages = [{"role": "user", "content": text}]
    return ask, ask.request(messages, pair.model, pair.tokenizer, 0)


def shown(pair: Pair, read: DecisionRequest) -> list[str]:
    """Return each canvas as text, with `_` for slots."""
    found = []
    for template in read.templates:
        text = [pair.tokenizer.decode([token], False) for token in template.tokens]
        for slot in template.blanks:
            for offset in range(slot.labels.width):
                if len(slot.labels.allowed((), offset)) > 1:
                    text[slot.begin + offset] = "_"
        found.append("".join(text).replace("<pad>", ""))
    return found


def test_ten_questions_share_a_canvas_and_a_pass(demo: Pair) -> None:
    _, few = request(demo, "x", questions=[PREDICATE] * 3)
    assert shown(demo, few) == ["1. _\n2. _\n3. _<turn|>"]
    _, ten = request(demo, "x", questions=[PREDICATE] * 10)
    assert shown(demo, ten) == ["\n".join("_" * 10) + "<turn|>"]
    (result,) = Generator(demo.model).run([ten])
    assert result.steps == [1]
    _, many = request(demo, "x", questions=[PREDICATE] * 40)
    assert [each.count("_") for each in shown(demo, many)] == [16, 16, 8]


def test_many_options_have_names_of_two_letters(demo: Pair) -> None:
    assert letters(27)[:2] == ["AA", "AB"]
    _, read = request(demo, "x", questions=[choice(*(f"option {n}" for n in range(30)))])
    assert len(read.templates[0].blanks[0].labels.forks) == 1 + 2
    (result,) = Generator(demo.model).run([read])
    assert isinstance(result, DecisionResult)
    assert result.steps == [3]
    assert result.draws[0].sum() == pytest.approx(1)


def test_the_demo_model_knows_its_sums(demo: Pair) -> None:
    sums = {"12+34=": ("46", "45", "4"), "31-75=": ("-44", "44", "-34")}
    for text, options in sums.items():
        ask, read = request(demo, text, questions=[choice(*options)], layout="bare", samples=4)
        (result,) = Generator(demo.model).run([read])
        assert isinstance(result, DecisionResult)
        (answer,) = ask.answers(result.draws)
        assert answer["choice"] == options[0]
        assert answer["confidence"] > 0.9
        first = result.draws[0][:, 0]
        assert answer["probabilities"][0]["standard_error"] == pytest.approx(
            np.std(first, ddof=1) / 2
        )


def test_questions_follow_the_text_of_a_message_with_images() -> None:
    (question,) = read_questions([PREDICATE])
    text = with_questions([{"role": "user", "content": "x"}], [question])[0]["content"]
    assert text.startswith("x\n\nAnswer each with one letter.")
    image = {"type": "image"}
    parts = [image, {"type": "text", "text": "x"}]
    (message,) = with_questions([{"role": "user", "content": parts}], [question])
    assert message["content"] == [image, {"type": "text", "text": text}]
    (message,) = with_questions([{"role": "user", "content": [image]}], [question])
    alone = {"type": "text", "text": text.removeprefix("x\n\n")}
    assert message["content"] == [image, alone]
    for wrong in ([], ["x"], [{"text": "x"}]):  # such content is left to the chat template
        (message,) = with_questions([{"role": "user", "content": wrong}], [question])
        assert message["content"] == [*wrong, alone]


def test_a_temperature_is_for_its_own_type_of_question() -> None:
    ask = Ask.from_json({"questions": [PREDICATE, choice("a", "b")], "temperatures": {"choice": 2}})
    draws = [np.array([[0.9, 0.1]]), np.array([[0.9, 0.1]])]
    predicate, chosen = ask.answers(draws)
    assert predicate["probability"] == pytest.approx(0.9)
    assert chosen["confidence"] == pytest.approx(0.75)  # odds of 9:1 become 3:1
    for wrong in (3, {"choice": 0}, {"choice": True}, {"x": 1}):
        with pytest.raises(CanvasError, match="temperatures"):
            Ask.from_json({"questions": [PREDICATE], "temperatures": wrong})


def test_a_question_that_fits_no_canvas_is_named(demo: Pair) -> None:
    with pytest.raises(CanvasError, match=r"questions\[0\]\.choices needs 4[12] tokens"):
        request(demo, "x", questions=[choice("a" * 40, "b" * 40)], layout="bare")
