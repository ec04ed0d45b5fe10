"""Log-probabilities over the OpenAI API and Triton: they equal the runtime's, for the visible tokens."""

from __future__ import annotations

import json
from functools import partial
from math import exp
from typing import Any

import pytest
from openai import OpenAI

from canvasrt.containers.client.triton import Client
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers.serving import Local, needs_triton

pytestmark = needs_triton
CHAT: Any = [{"role": "user", "content": "12+34="}]
FEW: Any = {"max_denoising_steps": 4}


def chat(openai: OpenAI, **more: Any) -> Any:
    asked = {"max_tokens": 20, "logprobs": True, "top_logprobs": 2, "seed": 3, "extra_body": FEW}
    return openai.chat.completions.create(model="canvasrt", messages=CHAT, **{**asked, **more})


def test_chats_and_triton_have_the_runtime_s(openai: OpenAI, http: Client, local: Local) -> None:
    options = {"max_new_tokens": 20, "logprobs": True, "top_logprobs": 2, "seed": 3, **FEW}
    expected = local("12+34=", **options).logprobs
    answer = http.infer({"prompt": "12+34=", **options})
    shown = json.loads(answer.logprobs)
    assert [each["token_id"] for each in shown] == answer.token_ids
    content = chat(openai).choices[0].logprobs.content
    assert len(content) >= len(expected) - 1  # the token that ends the answer is not visible
    for ours, tritons, theirs in zip(content, shown, expected, strict=False):
        assert ours.logprob == tritons["logprob"] == pytest.approx(theirs.logprob)
        assert [each.logprob for each in ours.top_logprobs] == pytest.approx(
            [logprob for _, logprob in theirs.top]
        )
    choices = [choice for chunk in chat(openai, stream=True) for choice in chunk.choices]
    assert [
        score for each in choices if each.logprobs for score in each.logprobs.content
    ] == content


def test_completions_have_them_and_their_offsets(openai: OpenAI) -> None:
    """In a stream, too, offsets count from the beginning of the answer."""
    asked: Any = {"prompt": "12+34=", "logprobs": 3, "max_tokens": 64, "seed": 3, "n": 2}
    asked |= {"model": "canvasrt", "extra_body": {**FEW, "ignore_eos": True}}
    whole = [each.logprobs for each in openai.completions.create(**asked).choices]
    for found in whole:
        assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) > 0
        assert all(len(each) == 3 for each in found.top_logprobs)
    streamed: list[list[int]] = [[], []]
    for chunk in openai.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                streamed[choice.index] += choice.logprobs.text_offset or ()
    assert streamed == [each.text_offset for each in whole]


def test_an_echo_begins_with_the_prompt_and_its_scores(
    openai: OpenAI, tokenizer: Tokenizer
) -> None:
    """The prompt is sent as text and as token ids, as lm-eval does."""
    asked = {"model": "canvasrt", "seed": 3, "max_tokens": 1, "logprobs": 1, "echo": True}
    told = openai.completions.create(prompt="12+34=", **asked).choices[0]
    scores = told.logprobs
    assert scores is not None
    assert told.text.startswith("12+34=")
    assert "".join(scores.tokens or ()).endswith(told.text)
    assert (scores.token_logprobs or ())[0] is None
    assert all(each < 0 for each in (scores.token_logprobs or ())[1:])
    ids = tokenizer.encode("12+34=")
    again = openai.completions.create(prompt=ids, **asked).choices[0]
    assert (again.text, again.logprobs) == (told.text, scores)
    stream = list(openai.completions.create(prompt=ids, **asked, stream=True))
    assert "".join(each.choices[0].text for each in stream) == told.text
    listed = [each.choices[0].logprobs for each in stream if each.choices[0].logprobs]
    assert [score for each in listed for score in each.token_logprobs] == scores.token_logprobs
    ended = openai.completions.create(prompt=ids, **asked, logit_bias={"1": 100}).choices[0]
    assert (ended.text, ended.finish_reason) == ("12+34=", "stop")
    assert len(ended.logprobs.token_logprobs or ()) == len(ids) + 1  # type: ignore[union-attr]
    plain = openai.completions.create(prompt=ids, **asked | {"logprobs": None}).choices[0]
    assert plain.text == told.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("prompt", ["12+34=", "<|turn>1<turn|>2"])
def test_an_echo_s_offsets_are_places_in_its_text(
    openai: OpenAI, tokenizer: Tokenizer, prompt: str, as_ids: bool, stream: bool
) -> None:
    """A special token has no place there, unless the caller's text spells it: the tokenizer's `<bos>`, for one."""
    asked: Any = {"model": "canvasrt", "max_tokens": 4, "logprobs": 0, "echo": True, "seed": 3}
    asked |= {"prompt": [prompt, tokenizer.encode(prompt)][as_ids], "stream": stream}
    asked |= {"extra_body": {**FEW, "ignore_eos": True}}
    told = openai.completions.create(**asked)
    choices = [each.choices[0] for each in (told if stream else [told])]
    text = "".join(each.text for each in choices)
    scores = [each.logprobs for each in choices if each.logprobs]
    tokens = [token for each in scores for token in each.tokens]
    offsets = [offset for each in scores for offset in each.text_offset]
    found = "".join(
        text[begin:end] for begin, end in zip(offsets, [*offsets[1:], len(text)], strict=True)
    )
    assert found == text
    for token, begin, end in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
        special = len(token) > 1
        assert text[begin:end] in ([token, ""] if special else [token])
    assert (tokens[0], offsets[:2]) == ("<bos>", [0, 0])


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_may_be_all(openai: OpenAI, tokenizer: Tokenizer, stream: bool) -> None:
    """With `max_tokens: 0`, older evaluation tools ask for a prompt's log-probabilities."""
    asked = {"model": "canvasrt", "max_tokens": 0, "logprobs": 1, "echo": True, "stream": stream}
    told = openai.completions.create(prompt="12+34=", **asked)
    choices = [each.choices[0] for each in (told if stream else [told])]
    scores = [x for each in choices if each.logprobs for x in each.logprobs.token_logprobs or ()]
    assert "".join(each.text for each in choices) == "12+34="
    assert len(scores) == len(tokenizer.encode("12+34="))
    assert choices[-1].finish_reason == "length"
    if not stream:
        assert told.usage.completion_tokens == 0
        assert told.usage.denoising_steps == 1


def test_vllms_reads(openai: OpenAI, tokenizer: Tokenizer) -> None:
    """A request like vLLM's structured_diffusion example: a canvas of fixed text, with noise at the label, returns the
    labels' scores."""
    four, six = tokenizer.encode("46", False)
    read = {"diffusion_seed_canvas": [four, 9] + [0] * 30, "diffusion_canvas_length": 32}
    read |= {"diffusion_max_steps": 1, "diffusion_read_only": True}

    def ask(**more: Any) -> list[dict[int, float]]:
        own = {"logprob_token_ids": [four, six], "return_tokens_as_token_ids": True}
        extra = own | {"vllm_xargs": read | more}
        (choice,) = chat(openai, max_tokens=3, top_logprobs=20, extra_body=extra).choices
        assert (choice.finish_reason, len(choice.logprobs.content)) == ("length", 3)
        return [
            {int(top.token.removeprefix("token_id:")): top.logprob for top in each.top_logprobs}
            for each in choice.logprobs.content
        ]

    free, constrained = ask(), ask(diffusion_constrained=True)
    for one, other in zip(free, constrained, strict=True):
        assert one.keys() >= other.keys() == {four, six}
        assert sum(map(exp, other.values())) == pytest.approx(1)
        assert other[four] - other[six] == pytest.approx(one[four] - one[six], abs=1e-4)


@pytest.mark.parametrize("way", ["chat", "generate", "raw"])
def test_ollama_has_them_in_its_form(front: FrontEnd, openai: OpenAI, way: str) -> None:
    ollama = pytest.importorskip("ollama").Client(host=front.url.removesuffix("/v1"))
    options = {**FEW, "seed": 3, "num_predict": 20}
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
        expected = chat(openai).choices[0].logprobs.content
        assert [each.logprob for each in told] == [each.logprob for each in expected]
