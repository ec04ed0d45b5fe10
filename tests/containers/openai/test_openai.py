"""Answers of the front end through the real `openai` client."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from openai import OpenAI

from canvasrt.containers.client.triton import Client
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers.serving import Local, needs_triton

pytestmark = needs_triton
QUESTION = [{"role": "user", "content": "12+34="}]
SHORT: dict[str, Any] = {"seed": 7, "max_tokens": 40, "extra_body": {"max_denoising_steps": 6}}
SAME: dict[str, Any] = {"seed": 7, "max_new_tokens": 40, "max_denoising_steps": 6}


def chat(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "canvasrt", "messages": QUESTION, **SHORT, **options}
    )


def test_a_chat_completion(openai: OpenAI, local: Local, tokenizer: Tokenizer):
    expected = local("12+34=", **SAME)
    answer = chat(openai)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(expected.token_ids)
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.model == "canvasrt"
    assert answer.system_fingerprint == "fp_0123456789ab"
    assert answer.canvasrt == {"seed": 7}
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == 40
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 40
    assert answer.usage.denoising_steps == sum(expected.steps)


def test_without_a_seed_one_is_drawn_and_told(openai: OpenAI):
    answers = [chat(openai, seed=seed) for seed in (None, -1)]
    seeds = [answer.canvasrt["seed"] for answer in answers]
    assert seeds[0] != seeds[1]
    again = chat(openai, seed=seeds[0], stream=True)
    chunks = list(again)
    assert all(chunk.canvasrt == {"seed": seeds[0]} for chunk in chunks)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == answers[0].choices[0].message.content


def test_a_streamed_chat_completion(openai: OpenAI):
    chat(openai)  # the next two requests then find the prompt in the prefix cache
    whole = chat(openai)
    chunks = list(chat(openai, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    pieces = [delta.content for delta in deltas if delta.content]
    assert len(pieces) == 2  # 40 tokens are two blocks of 32
    assert "".join(pieces) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["length"]
    assert reasons[-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    # The other chunks have the field, too.
    assert [chunk.to_dict()["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert len({chunk.id for chunk in chunks}) == 1
    *_, last = chat(openai, stream=True)  # usage was not asked for
    assert last.choices[0].finish_reason == "length"
    assert "usage" not in last.to_dict()
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_shared_beginnings_are_encoded_once_and_told(openai: OpenAI):
    beginning = "".join(chr(97 + index % 26) for index in range(300))

    def ask(text: str, **options: Any) -> Any:
        messages = [{"role": "user", "content": beginning + text}]
        return chat(openai, messages=messages, **options)

    first, other = ask("1"), ask("2")
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert other.usage.prompt_tokens_details.cached_tokens == 256
    again = ask("1")
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens
    assert again.choices[0].message.content == first.choices[0].message.content
    several = ask("3", n=3)
    assert several.usage.prompt_tokens_details.cached_tokens == 256


def test_settled_text_is_sent_before_its_block(openai: OpenAI):
    extra = {"settle_steps": 1, "confidence_threshold": 3.0, "max_denoising_steps": 12}
    whole = chat(openai, extra_body=extra)
    pieces = [
        chunk.choices[0].delta.content
        for chunk in chat(openai, stream=True, extra_body=extra)
        if chunk.choices and chunk.choices[0].delta.content
    ]
    assert len(pieces) > 2  # more than one piece per block
    assert "".join(pieces) == whole.choices[0].message.content


def test_drafts_are_sent_on_request(openai: OpenAI):
    whole = chat(openai)
    options = {"include_usage": True, "drafts": True}
    chunks = list(chat(openai, n=2, stream=True, stream_options=options))
    drafts = [chunk.canvasrt["draft"] for chunk in chunks if "draft" in chunk.canvasrt]
    assert len(drafts) == chunks[-1].usage.denoising_steps
    assert {draft["index"] for draft in drafts} == {0, 1}
    first = [draft for draft in drafts if draft["index"] == 0]
    assert [draft["step"] for draft in first if draft["block"] == 0] == list(range(1, 7))
    assert all(len(draft["best"]) == len(draft["noisy"]) == 32 for draft in drafts)
    assert all(draft["noisy"] != draft["best"] for draft in drafts if not all(draft["accepted"]))
    last = next(draft for draft in first if draft["step"] == 6)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content.startswith("".join(last["best"]).replace("<pad>", ""))
    assert len(said) > len(whole.choices[0].message.content)


def test_n_answers_take_seeds_that_count_up(openai: OpenAI):
    alone = [chat(openai, seed=7 + i).choices[0].message.content for i in range(3)]
    together = chat(openai, n=3)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.message.content for choice in together.choices] == alone
    assert len(set(alone)) > 1
    assert together.usage.completion_tokens == 120
    assert together.usage.prompt_tokens == chat(openai).usage.prompt_tokens
    streamed = ["", "", ""]
    for chunk in chat(openai, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == alone


def test_a_short_context_shortens_the_last_block_or_an_answer_without_a_budget(openai: OpenAI):
    whole = {"ignore_eos": True, "max_denoising_steps": 1}
    cases = ((4056, {"max_tokens": 64}, 32), (3960, {}, 128), (4075, {"max_tokens": 32}, 16))
    for prompt, given, tokens in (*cases, (4075, {}, 16), (4075, {"max_tokens": 3}, 3)):
        answer = openai.completions.create(
            model="canvasrt", prompt=[9] * prompt, seed=1, extra_body=whole, **given
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == tokens
        assert answer.choices[0].finish_reason == "length"


def test_completions_take_prompts_as_they_are(openai: OpenAI, tokenizer: Tokenizer):
    ids = tokenizer.encode("sort 41")

    def complete(prompt: Any, **options: Any) -> Any:
        return openai.completions.create(
            **{"model": "canvasrt", "prompt": prompt, **SHORT, **options}
        )

    by_text, by_ids = complete("sort 41"), complete(ids)
    assert by_text.object == "text_completion"
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.usage.prompt_tokens == len(ids)
    several = complete(["sort 41", "ab"], n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == by_text.choices[0].text
    assert several.choices[2].text == complete("ab").choices[0].text
    assert several.usage.prompt_tokens == len(ids) + len(tokenizer.encode("ab"))
    assert complete([ids, ids]).usage.prompt_tokens == 2 * len(ids)
    streamed = [chunk.choices[0] for chunk in complete("sort 41", stream=True)]
    assert "".join(choice.text for choice in streamed) == by_text.choices[0].text
    assert streamed[-1].finish_reason == "length"


@pytest.mark.parametrize("length", [1, 3])
def test_stop_strings_cut_exactly(openai: OpenAI, length: int):
    text = chat(openai).choices[0].message.content
    # The stop string begins at the end of the first block, where a stream could send too much.
    first = next(iter(c for c in _pieces(chat(openai, stream=True)) if c))
    place = len(first) - 1
    stop = text[place : place + length]
    expected = text[: text.find(stop)]
    answer = chat(openai, stop=stop)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 40
    chunks = list(
        chat(openai, stop=["never said", stop], stream=True, stream_options={"include_usage": True})
    )
    assert "".join(_pieces(chunks)) == expected
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == "stop"


def _pieces(chunks: Any) -> list[str]:
    return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


def test_a_stop_string_ends_the_work_too(openai: OpenAI, grpc: Client):
    text = chat(openai).choices[0].message.content
    stop = text[3:5]
    events = list(grpc.stream({"prompt": "12+34=", "stop": [stop], **SAME, "max_new_tokens": 3000}))
    assert [event.event for event in events] == ["block", "final"]
    assert events[-1].text == text[: text.find(stop)]
    assert events[-1].steps == [6]
    assert events[-1].finish_reason == "stop"


OWN = {"max_denoising_steps": 9, "entropy_bound": 0.7, "t_min": 0.3, "t_max": 1.1}
OWN |= {"stability_threshold": 2, "confidence_threshold": 0.5, "early_stop": False}
UNSURE = {"entropy_bound": 20.0}  # accepts uncertain tokens, so draws matter


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        (OWN, {}),
        ({"temperature": 0.0}, {}),
        ({"temperature": 0.5}, {}),
        ({"top_p": 0.4, **UNSURE}, {}),
        ({"top_k": 2, "min_p": 0.1, **UNSURE}, {}),
        (
            {"logit_bias": {"70": 3, "31": -100}, **UNSURE},
            {"logit_bias": ((31, -100.0), (70, 3.0))},
        ),
    ],
    ids=str,
)
def test_settings_are_the_runtime_s(
    openai: OpenAI,
    local: Local,
    tokenizer: Tokenizer,
    fields: dict[str, Any],
    params: dict[str, Any],
):
    expected = local("12+34=", **{**SAME, **fields, **params})
    answer = chat(openai, extra_body={"max_denoising_steps": 6, **fields})
    assert answer.choices[0].message.content == tokenizer.decode(expected.token_ids)
    assert answer.usage.denoising_steps == sum(expected.steps)
    assert expected.token_ids != local("12+34=", **SAME).token_ids


def test_positions_are_pinned(openai: OpenAI, grpc: Client):
    """The request also sets the size of the canvas."""
    canvas = {"seed": [None, 9], "pin": {"3": 41, "17": 42}, "allow": {"5": [50, 51]}}
    more = {"max_denoising_steps": 4, "canvas_length": 16}
    asked = {"prompt": "12+34=", **SAME, **more, "canvas": json.dumps(canvas)}
    *drafts, final = grpc.stream({**asked, "drafts": True})
    assert any(event.canvas for event in drafts)
    assert (final.token_ids[3], final.token_ids[17]) == (41, 42)
    assert final.token_ids[5] in (50, 51)
    answer = chat(openai, extra_body={"canvas": canvas, **more})
    assert answer.choices[0].message.content == final.text


def test_what_means_no_change_is_taken(openai: OpenAI):
    neutral: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1,
        "extra_body": {"top_k": -1, "min_p": 0.0, "max_denoising_steps": 6},
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": [],
        "user": "somebody",
        "metadata": {"purpose": "test"},
        "max_completion_tokens": 40,
    }
    assert chat(openai, **neutral).choices[0] == chat(openai).choices[0]


def test_models(openai: OpenAI):
    assert [model.id for model in openai.models.list()] == ["canvasrt", "alias"]
    assert openai.models.retrieve("alias").owned_by == "canvasrt"
    assert chat(openai, model="alias").model == "alias"


def test_metrics_are_tritons_and_our_own(front: FrontEnd, openai: OpenAI):
    def value(start: str) -> float:
        with urllib.request.urlopen(f"{front.url}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(start))

    endpoint = 'endpoint="/v1/chat/completions",status="200"'
    requests = f"canvasrt_openai_requests_total{{{endpoint}}}"
    tokens = 'canvasrt_openai_tokens_total{kind="completion"}'
    before = value(requests), value(tokens), value("nv_inference_request_success")
    chat(openai)
    assert value(requests) == before[0] + 1
    assert value(tokens) == before[1] + 40
    assert value("nv_inference_request_success") > before[2]
    assert value("canvasrt_requests_in_flight") == 0
