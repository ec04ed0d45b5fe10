"""Scores of blocks over the OpenAI API and Triton: those of the runtime, only if asked for."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from canvasrt.containers.client.triton import Client
from tests.helpers.serving import Local, needs_triton

pytestmark = needs_triton
MESSAGES: Any = [{"role": "user", "content": "12+34="}]
# No attempt is good enough, so the best of three stands.
OWN = {"max_denoising_steps": 4, "redo_below": -1e-9, "max_redos": 2}
OPTIONS = {"seed": 3, "max_new_tokens": 20, **OWN}


def expected(local: Local, **more: Any) -> list[dict[str, float]]:
    scores = [asdict(each) for each in local("12+34=", **OPTIONS, **more).block_scores]
    assert [each["redone"] for each in scores] == [2]
    return scores


def same(found: Any, wanted: list[dict[str, float]]) -> bool:
    return [each["redone"] for each in found] == [each["redone"] for each in wanted] and [
        each["score"] for each in found
    ] == pytest.approx([each["score"] for each in wanted])


@pytest.mark.parametrize("more", [{}, {"score_by_denoising": True}])
def test_chats_and_completions_have_them(
    openai: OpenAI, local: Local, more: dict[str, bool]
) -> None:
    given: dict[str, Any] = {"model": "canvasrt", "max_tokens": 20, "seed": 3}
    given["extra_body"] = OWN | more
    wanted = expected(local, **more)
    reply = openai.chat.completions.create(messages=MESSAGES, **given)
    assert same(reply.choices[0].block_scores, wanted)  # type: ignore[attr-defined]
    steps = local("12+34=", **OPTIONS, **more).steps
    assert reply.usage.denoising_steps == sum(steps)  # type: ignore[union-attr]
    last = [
        choice
        for chunk in openai.chat.completions.create(messages=MESSAGES, stream=True, **given)
        for choice in chunk.choices
    ][-1]
    assert last.finish_reason
    assert same(last.block_scores, wanted)  # type: ignore[attr-defined]
    text = openai.completions.create(prompt="12+34=", **given)
    assert text.choices[0].block_scores[0]["redone"] == 2  # type: ignore[attr-defined]


def test_responses_have_them(openai: OpenAI, local: Local) -> None:
    reply = openai.responses.create(
        model="canvasrt", input="12+34=", max_output_tokens=20, extra_body={"seed": 3, **OWN}
    )
    assert same(reply.canvasrt["block_scores"], expected(local))  # type: ignore[attr-defined]


def test_triton_has_them(http: Client, local: Local) -> None:
    answer = http.infer({"prompt": "12+34=", **OPTIONS})
    assert same(json.loads(answer.block_scores), expected(local))


def test_nobody_else_gets_them(openai: OpenAI, http: Client) -> None:
    reply = openai.chat.completions.create(model="canvasrt", messages=MESSAGES, max_tokens=20)
    assert not hasattr(reply.choices[0], "block_scores")
    assert http.infer({"prompt": "12+34=", "max_new_tokens": 8}).block_scores == ""


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"redo_below": 0.5}, "redo_below"),
        ({"redo_below": -1.0, "settle_steps": 1}, "settle_steps"),
        ({"score_blocks": True, "response_format": {"type": "json_object"}}, "score_blocks"),
    ],
)
def test_what_cannot_be_is_refused(openai: OpenAI, given: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as error:
        openai.chat.completions.create(model="canvasrt", messages=MESSAGES, extra_body=given)
    assert error.value.param == param
