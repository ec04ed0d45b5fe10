"""Fields that real clients send: fields that change no answer are accepted, and errors use the caller's names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from canvasrt.containers.openai import decisions, ollama, systemone
from canvasrt.containers.openai.body import read_body
from canvasrt.containers.openai.chat import (
    CompletionRequest,
    chat_generation,
    completion_generation,
)
from canvasrt.containers.openai.chunks import ChatReply, CompletionReply
from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.fields import Ignored
from canvasrt.containers.openai.generation import Generation, Served, answer_inputs
from canvasrt.containers.openai.messages import read_messages
from canvasrt.containers.openai.response_events import ResponseReply
from canvasrt.containers.openai.responses import ResponsesRequest, response_generation
from canvasrt.containers.openai.tokenize import TokenizeRequest, tokenize
from canvasrt.containers.openai.tools import ChatRequest
from canvasrt.containers.openai.vllm_fields import vllm_scores
from canvasrt.containers.triton.inputs import check_shapes
from canvasrt.errors import CanvasError

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "12+34="}]}
SCHEMA = {"type": "object"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
NOUL = {"type": "noul", "instructions": "Is it?"}
CHOICE = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a", "odd": 1}]}
PARSERS: dict[Any, Any] = {
    ChatRequest: chat_generation,
    CompletionRequest: completion_generation,
    decisions.DecisionRequest: decisions.decide,
    systemone.SystemOneRequest: systemone.ask,
    ollama.OllamaChat: ollama.chat,
}


def parsed(kind: Any, fields: dict[str, Any], ignored: Ignored | None = None) -> Any:
    return PARSERS[kind](read_body(kind, json.dumps(fields).encode(), ignored))


FORM = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "foo": 1}}
# The kind of body, the path of its unknown field, and the body's fields.
NESTED: list[tuple[Any, str, dict[str, Any]]] = [
    (ChatRequest, "response_format.json_schema.foo", CHAT | {"response_format": FORM}),
    (
        ChatRequest,
        "response_format.foo",
        CHAT | {"response_format": {"type": "json_object", "foo": 1}},
    ),
    (
        CompletionRequest,
        "structured_outputs.foo",
        {"prompt": "a", "structured_outputs": {"regex": "a", "foo": 1}},
    ),
    (CompletionRequest, "vllm_xargs.odd", {"prompt": "a", "vllm_xargs": {"odd": 1}}),
    (
        decisions.DecisionRequest,
        "questions[0].choices[0].odd",
        {"input": "a", "questions": [CHOICE]},
    ),
    (
        decisions.DecisionRequest,
        "questions[0].levels[0].odd",
        {"input": "a", "questions": [{"type": "score", "levels": [{"label": "a", "odd": 1}]}]},
    ),
    (
        decisions.DecisionRequest,
        "questions[0].prompt",
        {"input": "a", "questions": [{"type": "predicate", "prompt": 1}]},
    ),
    (
        systemone.SystemOneRequest,
        "questions.a.prompt",
        {"state": "a", "questions": {"a": NOUL | {"prompt": 1}}},
    ),
    (ollama.OllamaChat, "tools[0].more", CHAT | {"tools": [{**TOOL, "more": {"a": 1}}]}),
]


@pytest.mark.parametrize(("kind", "path", "fields"), NESTED, ids=str)
def test_nested_unknown_fields_are_left_out(kind: Any, path: str, fields: dict[str, Any]) -> None:
    ignored = Ignored()
    asked = parsed(kind, fields, ignored)
    assert ignored == [f"Unknown parameter: {path!r}."]
    assert path.rpartition(".")[2] not in json.dumps(asked.options)
    with pytest.raises(ApiError) as caught:
        parsed(kind, fields)
    assert (caught.value.param, caught.value.code) == (path, "unknown_parameter")


def test_what_clients_of_others_send() -> None:
    """The front end accepts more stop strings than OpenAI's, an empty stop string, a missing model, and llama.cpp's
    form of a schema."""
    stops = [str(number) for number in range(15)]
    form = {"type": "json_object", "schema": SCHEMA}
    asked = parsed(ChatRequest, CHAT | {"stop": ["", *stops], "response_format": form})
    assert asked.options["stop"] == stops
    assert json.loads(asked.options["grammar"]) == {"type": "json_schema", "schema": SCHEMA}
    assert "stop" not in parsed(ChatRequest, CHAT | {"stop": ""}).options
    # The examples of LM Studio send -1 for "no limit".
    assert "max_new_tokens" not in parsed(ChatRequest, CHAT | {"max_tokens": -1}).options
    whole = {"prompt": "1", "max_tokens": -1}
    assert "max_new_tokens" not in parsed(CompletionRequest, whole).options
    # In Ollama, too, null means a stream.
    assert read_body(ollama.OllamaPrompt, b'{"prompt": "a", "stream": null}').stream
    for kind in PARSERS:
        body = kind.model_construct()
        body.check_model(("one", "two"))
        assert body.model == "one"


def test_a_completion_may_have_its_budget_under_both_names() -> None:
    """GuideLLM up to 0.3 sends both names."""
    both = {"prompt": "1", "max_tokens": 5, "max_completion_tokens": 5}
    assert parsed(CompletionRequest, both).options["max_new_tokens"] == 5
    for other in ({"prompt": "1", "max_completion_tokens": 5}, both | {"max_tokens": 6}):
        with pytest.raises(ApiError, match="max_completion_tokens is not supported"):
            parsed(CompletionRequest, other)
        ignored = Ignored(lenient=True)
        parsed(CompletionRequest, other, ignored)
        assert "max_completion_tokens" in ignored[0]


def test_a_prompt_beyond_the_context_is_told_a_length_that_fits() -> None:
    served = Served(max_context=64, canvas=32)
    for count, fits in ((65, False), (32, True)):
        asked = parsed(CompletionRequest, {"prompt": [5] * count})
        if fits:
            answer_inputs(asked, served)
        else:
            with pytest.raises(ApiError, match="to 32 tokens, for 32 new ones"):
                answer_inputs(asked, served)
            with pytest.raises(CanvasError) as caught:
                check_shapes({"prompt_ids": [count]}, 64, 32)
            assert "to 32 tokens" in caught.value.hint


def test_whole_numbers_may_have_a_point() -> None:
    """In JSON, 8.0 is the integer 8; vLLM and Ollama accept it, too."""
    floats = {"max_tokens": 8.0, "n": 2.0, "seed": 3.0, "min_tokens": 1.0, "top_k": 4.0}
    read = read_body(CompletionRequest, json.dumps({"prompt": "1", **floats}).encode())
    assert all(type(getattr(read, name)) is int for name in floats)
    assert {name: getattr(read, name) for name in floats} == floats
    negative = read_body(CompletionRequest, b'{"prompt": "1", "seed": -5}')
    assert negative.seed == 2**64 - 5
    options = {"num_predict": 0, "seed": 3.0, "top_k": 4.0}  # 0 means no limit
    fields = json.dumps({"prompt": "1", "options": options}).encode()
    asked = ollama.generate(read_body(ollama.OllamaPrompt, fields))
    assert (asked.seed, asked.options["top_k"], "max_new_tokens" in asked.options) == (3, 4, False)


def test_ollamas_penalty_is_not_passed_over_in_silence() -> None:
    ignored = Ignored()
    parsed(ollama.OllamaChat, CHAT | {"options": {"repeat_penalty": 1.1}}, ignored)
    parsed(ollama.OllamaChat, CHAT | {"options": {"repeat_penalty": 1}}, ignored)
    assert [each.split()[0] for each in ignored] == ["options.repeat_penalty"]


@pytest.mark.parametrize("nested", [False, True])
def test_vllms_settings_of_this_model(nested: bool) -> None:
    """The fields are those of vLLM's structured_diffusion example. Pinned tokens stay in every step."""
    theirs = {"diffusion_seed_canvas": [5, 6, 7, 8], "diffusion_pinned": [0, 2]}
    theirs |= {"diffusion_max_steps": 3, "diffusion_canvas_length": 4}
    fields = {"vllm_xargs": theirs | {"diffusion_read_only": False}} if nested else theirs
    options = parsed(CompletionRequest, {"prompt": "a", "min_tokens": 2, **fields}).options
    canvas = {"seed": [5, 6, 7, 8], "pin": {"0": 5, "2": 7}, "least": 2}
    assert json.loads(options["canvas"]) == canvas
    assert (options["max_denoising_steps"], options["canvas_length"]) == (3, 4)
    read = {"diffusion_read_only": 1, "diffusion_constrained": True}
    fields = {"vllm_xargs": theirs | read} if nested else theirs | read
    more = {"logprobs": 20, "logprob_token_ids": [9, 4], "max_tokens": 7}
    options = parsed(CompletionRequest, {"prompt": "a", **more, **fields}).options
    assert json.loads(options["canvas"])["allow"] == {"1": [9, 4], "3": [9, 4]}
    assert (options["max_new_tokens"], options["ignore_eos"], options["early_stop"]) == (4, 1, 0)
    assert options["logprob_token_ids"] == [9, 4]
    smallest = {"diffusion_canvas_length": -1}  # the length of the seed canvas determines it
    options = parsed(
        CompletionRequest, {"prompt": "a", **theirs, **read, **more, **smallest}
    ).options
    assert (options["max_new_tokens"], options["canvas_length"]) == (4, -1)
    for lacks in ({"diffusion_read_only": True}, {"diffusion_constrained": True}):
        with pytest.raises(ApiError, match="needs") as caught:
            parsed(CompletionRequest, {"prompt": "a", "vllm_xargs": lacks})
        assert caught.value.param == next(iter(lacks))


@pytest.mark.parametrize(("token", "logprob"), [(3, -3.0), (4, -0.0067)])
def test_only_labels_of_a_read_are_normalized(token: int, logprob: float) -> None:
    """The probability of a pinned token is not divided by the labels' sum; it would exceed 1."""
    read = {"diffusion_constrained": True, "logprob_token_ids": [4, 9]}
    request = CompletionRequest(prompt="a", **read)  # type: ignore[arg-type]
    top = [
        {"token_id": each, "text": "", "logprob": -float(each)}
        for each in dict.fromkeys((token, 4, 9))
    ]
    (shown,) = vllm_scores(request, [{**top[0], "top": top}])
    assert shown["logprob"] == top[0]["logprob"] == pytest.approx(logprob, abs=1e-4)


def test_offsets_count_the_text_and_not_the_names_of_its_tokens() -> None:
    top = {"token_id": 17, "text": "é", "logprob": -1.0}
    scores = json.dumps([{**top, "end": False, "top": [dict(top)]}] * 2)
    named: Any = {"return_tokens_as_token_ids": True}
    reply = CompletionReply(CompletionRequest(prompt="a", **named), Generation({}), 0, Served())
    shown = reply.scores(scores, 0) or {}
    assert (shown["tokens"], shown["text_offset"]) == (["token_id:17"] * 2, [0, 1])
    chat = ChatReply(ChatRequest(**CHAT, **named), Generation({}), 0, Served())
    (first, _) = (chat.scores(scores, 0) or {})["content"]
    assert (first["token"], first["bytes"]) == ("token_id:17", [195, 169])
    assert first["top_logprobs"] == [{"token": "token_id:17", "logprob": -1.0, "bytes": [195, 169]}]


def test_offsets_count_a_character_of_several_tokens_once() -> None:
    parts = [{"text": "\ufffd", "bytes": [byte]} for byte in "é".encode()]
    shown = [{**each, "token_id": 1, "logprob": 0.0, "top": []} for each in [*parts, {"text": "a"}]]
    scores = json.dumps([{**each, "end": False} for each in shown])
    reply = CompletionReply(CompletionRequest(prompt="a"), Generation({}), 0, Served())
    assert [(reply.scores(scores, 0) or {})["text_offset"] for _ in range(2)] == [
        [0, 1, 1],
        [2, 3, 3],
    ]


def test_a_state_in_other_scripts_is_not_escaped() -> None:
    body = {"state": {"name": "Zoë"}, "questions": {"a": NOUL}}
    asked = parsed(systemone.SystemOneRequest, body)
    assert asked.messages == [{"role": "user", "content": '{"name": "Zoë"}'}]


def test_unknown_fields_of_messages_are_left_out_of_what_is_tokenized() -> None:
    body = {"messages": [{**CHAT["messages"][0], "mood": "good"}]}
    for ignored in (Ignored(), None):
        read = read_body(TokenizeRequest, json.dumps(body).encode(), ignored)
        if ignored is None:
            with pytest.raises(ApiError, match="mood"):
                answer_inputs(tokenize(read))
        else:
            assert len(answer_inputs(tokenize(read))) == 1


def test_two_thoughts_of_a_response_are_kept() -> None:
    thoughts = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}
        for text in ("one, ", "two")
    ]
    said = {"role": "assistant", "content": "Hm."}
    items = [{"role": "user", "content": "?"}, thoughts[0], said, thoughts[1]]
    read = read_body(ResponsesRequest, json.dumps({"input": items}).encode())
    (_, turn) = response_generation(read).messages or ()
    assert turn == {"role": "assistant", "content": "Hm.", "reasoning_content": "one, two"}


def test_a_response_that_fails_at_once_begins_like_others() -> None:
    read = read_body(ResponsesRequest, b'{"input": "?"}')
    reply = ResponseReply(read, response_generation(read), 0, Served())
    kinds = [each["type"] for each in reply.failed(ApiError(503, "no"))]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]
    assert [each["type"] for each in reply.failed(ApiError(503, "no"))] == ["response.failed"]


def test_parts_and_roles_become_the_template_s() -> None:
    parts = [{"type": "text", "text": "12"}, {"type": "text", "text": "+3="}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "15", "refusal": None, "tool_calls": None},
    ]
    assert read_messages(messages).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "12+3="},
        {"role": "assistant", "content": "15"},
    ]


@pytest.mark.parametrize("detail", ["auto", "low", "high", "original", None])
def test_every_detail_of_openais_images(detail: str | None) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,aGk=", "detail": detail}}
    assert read_messages([{"role": "user", "content": [image]}]).images


@pytest.mark.parametrize(
    "field",
    [
        {"metadata": {"a": [1] * 400_000}},
        {"user": "x" * 1_100_000},
        {"tools": [{"type": "web_search", "x": [1] * 400_000}]},
        {"tool_choice": {"type": "auto", "x": [1] * 400_000}},
    ],
)
def test_what_a_response_repeats_is_bounded(field: dict[str, Any]) -> None:
    """A response repeats fields of its request up to three times, and encoding them blocks the event loop."""
    raw = json.dumps({"input": "x" * 1_100_000}).encode()
    assert "input" not in read_body(ResponsesRequest, raw).repeated()
    with pytest.raises(ApiError, match=r"has 1[0-9]{6} characters of JSON"):
        read_body(ResponsesRequest, json.dumps({"input": "x"} | field).encode(), Ignored())


@pytest.mark.parametrize(("reply", "lines"), [(ChatReply, 2), (ollama.ChatLines, 1)])
def test_an_object_of_a_stream_is_one_line_for_every_client(reply: Any, lines: int) -> None:
    # httpx, which Ollama's client uses, also ends lines at these characters.
    chunk = {"text": "a\u2028b\u2029c\u0085d"}
    read = reply(None, Generation({}), 0, Served()).encode(chunk).decode().splitlines()
    assert (len(read), json.loads(read[0].removeprefix("data: "))) == (lines, chunk)
