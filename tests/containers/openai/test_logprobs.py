"""Log-probabilities over the OpenAI API and Triton: those of the runtime, for the visible tokens."""

from __future__ import annotations

import json
from functools import partial

import pytest
from openai import OpenAI

from canvasrt.containers.client.triton import Client
from canvasrt.containers.serve.frontend import FrontEnd
from tests.helpers.serving import Local, needs_triton

pytestmark = needs_triton
CHAT = [{"role": "user", "content": "12+34="}]
OPTIONS = {"seed": 3, "max_denoising_steps": 4}


def test_chats_have_them(openai: OpenAI, local: Local) -> None:
    expected = local("12+34=", logprobs=True, top_logprobs=2, max_new_tokens=20, **OPTIONS)
    reply = openai.chat.completions.create(
        model="canvasrt",
        messages=CHAT,  # type: ignore[arg-type]
        max_tokens=20,
        logprobs=True,
        top_logprobs=2,
        seed=3,
        extra_body={"max_denoising_steps": 4},
    )
    content = reply.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content
    found = [each.logprob for each in content]
    assert found == pytest.approx([each.logprob for each in expected.logprobs][: len(found)])
    assert len(found) >= len(expected.token_ids) - 1
    for ours, theirs in zip(content, expected.logprobs, strict=False):
        assert [each.logprob for each in ours.top_logprobs] == pytest.approx(
            [logprob for _, logprob in theirs.top]
        )
    stream = openai.chat.completions.create(
        model="canvasrt",
        messages=CHAT,  # type: ignore[arg-type]
        max_tokens=20,
        logprobs=True,
        seed=3,
        stream=True,
        extra_body={"max_denoising_steps": 4},
    )
    streamed = []
    for chunk in stream:
        for choice in chunk.choices:
            if choice.logprobs and choice.logprobs.content:
                streamed += [each.logprob for each in choice.logprobs.content]
    assert streamed == found


def test_completions_have_them(openai: OpenAI) -> None:
    reply = openai.completions.create(
        model="canvasrt",
        prompt="12+34=",
        max_tokens=12,
        logprobs=3,
        seed=3,
        extra_body={"max_denoising_steps": 4},
    )
    found = reply.choices[0].logprobs
    assert found is not None
    assert found.tokens
    assert found.token_logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset or [])
    assert all(len(each) == 3 for each in found.top_logprobs or [])


def test_triton_has_them(http: Client, local: Local) -> None:
    answer = http.infer({"prompt": "12+34=", "logprobs": True, "max_new_tokens": 8, **OPTIONS})
    expected = local("12+34=", logprobs=True, max_new_tokens=8, **OPTIONS)
    shown = json.loads(answer.logprobs)
    assert [each["token_id"] for each in shown] == answer.token_ids
    assert [each["logprob"] for each in shown] == pytest.approx(
        [each.logprob for each in expected.logprobs]
    )
    assert http.infer({"prompt": "12+34=", "max_new_tokens": 8, **OPTIONS}).logprobs == ""


@pytest.mark.parametrize("way", ["chat", "generate", "raw"])
def test_ollama_has_them_in_its_form(front: FrontEnd, openai: OpenAI, way: str) -> None:
    ollama = pytest.importorskip("ollama").Client(host=front.url.removesuffix("/v1"))
    options = {**OPTIONS, "num_predict": 20}
    asked = {"model": "canvasrt", "options": options, "logprobs": True, "top_logprobs": 2}
    if way == "chat":
        ask = partial(ollama.chat, messages=CHAT, **asked)
    else:
        ask = partial(ollama.generate, prompt="12+34=", raw=way == "raw", **asked)
    told = ask().logprobs
    assert told
    assert all(len(each.top_logprobs) == 2 for each in told)
    assert [score for line in ask(stream=True) for score in line.logprobs or []] == told
    if way != "raw":
        same = openai.chat.completions.create(
            model="canvasrt",
            messages=CHAT,  # type: ignore[arg-type]
            max_tokens=20,
            logprobs=True,
            seed=3,
            extra_body={"max_denoising_steps": 4},
        )
        expected = same.choices[0].logprobs.content  # type: ignore[union-attr]
        assert [each.logprob for each in told] == [each.logprob for each in expected or ()]
