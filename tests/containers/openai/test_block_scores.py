"""Scores of blocks over the OpenAI API and Triton: they equal the runtime's, and are returned only if asked for."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from openai import OpenAI

from canvasrt.containers.client.triton import Client
from tests.helpers.serving import Local, needs_triton

pytestmark = needs_triton
MESSAGES: Any = [{"role": "user", "content": "12+34="}]
# No attempt reaches the score, so the best of three is kept.
OWN = {"max_denoising_steps": 4, "redo_below": -1e-9, "max_redos": 2}


@pytest.mark.parametrize("more", [{}, {"score_by_denoising": True}])
def test_every_protocol_has_them(
    openai: OpenAI, http: Client, local: Local, more: dict[str, bool]
) -> None:
    options = {"seed": 3, "max_new_tokens": 20, **OWN, **more}
    expected = local("12+34=", **options)
    wanted = [asdict(each) for each in expected.block_scores]
    assert [each["redone"] for each in wanted] == [2]
    given: dict[str, Any] = {"model": "canvasrt", "extra_body": {"seed": 3, **OWN, **more}}
    chat = openai.chat.completions.create(messages=MESSAGES, max_tokens=20, **given)
    assert chat.usage.denoising_steps == sum(expected.steps)  # type: ignore[union-attr]
    *_, last = openai.chat.completions.create(
        messages=MESSAGES, max_tokens=20, stream=True, **given
    )
    response = openai.responses.create(input="12+34=", max_output_tokens=20, **given)
    triton = http.infer({"prompt": "12+34=", **options})
    for found in (
        chat.choices[0].block_scores,  # type: ignore[attr-defined]
        last.choices[0].block_scores,
        response.canvasrt["block_scores"],  # type: ignore[attr-defined]
        json.loads(triton.block_scores),
    ):
        assert found == [pytest.approx(each) for each in wanted]
    text = openai.completions.create(prompt="12+34=", max_tokens=20, **given)
    assert text.choices[0].block_scores[0]["redone"] == 2  # type: ignore[attr-defined]


def test_nobody_else_gets_them(openai: OpenAI, http: Client) -> None:
    reply = openai.chat.completions.create(model="canvasrt", messages=MESSAGES, max_tokens=20)
    assert not hasattr(reply.choices[0], "block_scores")
    assert http.infer({"prompt": "12+34=", "max_new_tokens": 8}).block_scores == ""
