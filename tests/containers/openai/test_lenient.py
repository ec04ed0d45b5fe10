"""Fields that are ignored with a warning in the reply: unknown fields, unless `--strict` is set; with `--lenient`, also
unsupported fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from canvasrt.containers.openai.body import read_body
from canvasrt.containers.openai.chat import CompletionRequest
from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.fields import ANY, CHAT, COMPLETION, MAX_WARNINGS, Ignored
from canvasrt.containers.openai.messages import read_messages
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.openai.tools import ChatRequest
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from tests.helpers.alone import lone_front
from tests.helpers.serving import needs_triton

QUESTION = [{"role": "user", "content": "12+34="}]
SAME: dict[str, Any] = {"seed": 7, "max_tokens": 40, "max_denoising_steps": 6}
FOREIGN: dict[str, Any] = {"presence_penalty": 0.5, "bad_words": ["x"], "nonsense": {"a": 1}}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "canvasrt", "messages": QUESTION, **fields}).encode()


def test_every_unsupported_parameter_is_left_out_and_named() -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True, "more": 1}}
    ignored = Ignored(lenient=True)
    read = read_body(ChatRequest, body(**FOREIGN, **stream, temperature=0.5), ignored)
    assert sorted(each.split(".")[0].split(":")[0] for each in ignored) == [
        "Unknown parameter",
        "Unknown parameter",
        "bad_words is not supported",
        "presence_penalty is not supported",
    ]
    assert (read.temperature, read.wants_usage) == (0.5, True)
    with pytest.raises(ApiError, match="temperature"):
        read_body(ChatRequest, body(**FOREIGN, temperature="hot"), Ignored(lenient=True))
    with pytest.raises(ApiError, match="bad_words"):
        read_body(ChatRequest, body(**FOREIGN | {"presence_penalty": 0}), Ignored())


def test_each_of_many_tools_may_have_an_unknown_field() -> None:
    """Validation stops at the first tool with an unknown field, and is repeated only a few times. One warning is enough
    for all tools."""
    names = [f"f{n}" for n in range(9)]
    tools = [
        {"type": "function", "function": {"name": name, "return": {"type": "string"}}}
        for name in names
    ]
    ignored = Ignored()
    read = read_body(ChatRequest, body(tools=tools, nonsense=1), ignored)
    assert [each.function.name for each in read.tools or ()] == names
    unknown = ("tools[0].function.return", "nonsense")
    assert ignored == [f"Unknown parameter: {name!r}." for name in unknown]
    with pytest.raises(ApiError) as caught:
        read_body(ChatRequest, body(tools=tools))
    assert caught.value.code == "unknown_parameter"


def test_what_changes_no_answer_passes_without_a_word() -> None:
    """Every field of the tables is accepted with every listed value, even in strict mode."""
    for kind, table in ((ChatRequest, CHAT), (CompletionRequest, COMPLETION)):
        given = {"model": "x", "messages": QUESTION, "prompt": "a"}
        given.pop("prompt" if kind is ChatRequest else "messages")
        for name, values in table.items():
            if "." in name:
                continue
            for value in ("anything", {"a": 1}) if values is ANY else (None, *values):
                read_body(kind, json.dumps({**given, name: value}).encode())
            if values is not ANY:
                with pytest.raises(ApiError, match=name):
                    read_body(kind, json.dumps({**given, name: "other"}).encode(), Ignored())


def test_warnings_are_bounded() -> None:
    ignored = Ignored()
    read_body(ChatRequest, body(**{f"field_{number}": 1 for number in range(5000)}), ignored)
    assert len(ignored) == MAX_WARNINGS


def test_fields_of_messages_and_parts_too() -> None:
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}, "tone": 1}
    messages = [{"role": "user", "name": "Ann", "content": [part], "mood": "good"}]
    ignored = Ignored()
    assert read_messages(messages, ignored).messages == [{"role": "user", "content": "hello"}]
    unknown = ("messages[0].mood", "messages[0].content[0].tone")
    assert ignored == [f"Unknown parameter: {name!r}." for name in unknown]
    with pytest.raises(ApiError, match="mood"):
        read_messages(messages)
    audio = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]
    with pytest.raises(ApiError, match="input_audio"):
        read_messages(audio, Ignored(lenient=True))


def test_what_is_left_out_is_counted_and_a_strict_server_refuses_it() -> None:
    asked = {"messages": QUESTION, "odd": 1}
    for strict in (False, True):
        with lone_front(strict=strict) as front:
            replies = [front.post("/v1/chat/completions", json=asked) for _ in range(2)]
            metrics = front.get("/v1/metrics").text
        for reply in replies:
            assert reply.status_code == (400 if strict else 503)  # 503: no model
            assert ("Unknown parameter: 'odd'" in reply.text) == strict
        assert f"canvasrt_openai_ignored_fields_total {0 if strict else 2}\n" in metrics


@pytest.fixture(scope="module")
def lenient(server: Server) -> Iterator[FrontEnd]:
    with FrontEnd.over(server, FrontOptions(port=0, lenient=True)) as running:
        yield running


@needs_triton
def test_the_answer_is_the_same_and_has_the_warnings(lenient: FrontEnd, openai: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "canvasrt", "messages": QUESTION}
    plain = openai.chat.completions.create(**asked, extra_body=SAME)
    asked["extra_body"] = {**SAME, **FOREIGN}
    with OpenAI(base_url=lenient.url, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True))
        text = client.completions.create(model="canvasrt", prompt="12", suffix="b", max_tokens=4)
    assert answer.choices == plain.choices
    own = (answer.model_extra or {})["canvasrt"]
    assert (own["seed"], len(own["warnings"])) == (7, 3)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == plain.choices[0].message.content
    assert (chunks[0].model_extra or {})["canvasrt"] == own
    assert "suffix" in (text.model_extra or {})["canvasrt"]["warnings"][0]


@needs_triton
def test_responses_and_ollama_have_them_too(lenient: FrontEnd) -> None:
    def warnings(path: str, **fields: Any) -> list[str]:
        url = lenient.url.removesuffix("/v1") + path
        reply = httpx2.post(url, json={"model": "canvasrt", **fields}, timeout=60).json()
        return [each.split()[0] for each in reply["canvasrt"]["warnings"]]

    own = {"max_denoising_steps": 4, "max_output_tokens": 8}
    found = warnings("/v1/responses", input="12", background=True, safety="no", **own)
    assert sorted(found) == ["Unknown", "background"]
    options = {"repeat_penalty": 1.5, "mirostat": 2, "top_k": 40, "num_predict": 8}
    asked = {"messages": QUESTION, "stream": False, "suffix": "x", "options": options}
    left_out = ["suffix", "options.repeat_penalty", "options.mirostat"]
    assert warnings("/api/chat", **asked) == left_out
