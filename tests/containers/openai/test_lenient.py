"""Fields that are left out, with a warning in the reply: unknown ones, unless `--strict`; with `--lenient`, also
unsupported ones."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai as sdk
import pytest
from openai import OpenAI

from canvasrt.containers.openai import ollama
from canvasrt.containers.openai.body import read_body
from canvasrt.containers.openai.chat import ChatRequest, CompletionRequest
from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.fields import ANY, CHAT, COMPLETION, MAX_WARNINGS, Ignored
from canvasrt.containers.openai.messages import read_messages
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from tests.helpers.serving import needs_triton

QUESTION = [{"role": "user", "content": "12+34="}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
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


def test_only_what_is_unknown_is_left_out_unless_lenient() -> None:
    ignored = Ignored()
    read_body(ChatRequest, body(nonsense=1, tools=[{**TOOL, "more": {"a": 1}}]), ignored)
    assert ignored == ["Unknown parameter: 'tools[0].more'.", "Unknown parameter: 'nonsense'."]
    with pytest.raises(ApiError, match="bad_words"):
        read_body(ChatRequest, body(**FOREIGN | {"presence_penalty": 0}), Ignored())
    for fields in ({"nonsense": 1}, {"tools": [{**TOOL, "more": {"a": 1}}]}):
        with pytest.raises(ApiError) as caught:
            read_body(ChatRequest, body(**fields))
        assert caught.value.code == "unknown_parameter"


def test_each_of_many_tools_may_have_an_unknown_field() -> None:
    """Validation stops at the first tool with an unknown field, and is repeated only a few times."""
    tools = [
        {**TOOL, "function": {"name": f"f{n}", "return": {"type": "string"}}} for n in range(9)
    ]
    ignored = Ignored()
    read = read_body(ChatRequest, body(tools=tools), ignored)
    assert [each.function.name for each in read.tools or ()] == [f"f{n}" for n in range(9)]
    assert ignored == ["Unknown parameter: 'tools[0].function.return'."]


def test_tools_of_ollama_may_have_unknown_fields() -> None:
    asked, ignored = body(tools=[{**TOOL, "more": {"a": 1}}]), Ignored()
    ollama.chat(read_body(ollama.OllamaChat, asked, ignored))
    assert ignored == ["Unknown parameter: 'tools[0].more'."]
    with pytest.raises(ApiError) as caught:
        ollama.chat(read_body(ollama.OllamaChat, asked))
    assert caught.value.code == "unknown_parameter"


def test_what_changes_no_answer_passes_without_a_word() -> None:
    """Each field of the tables passes with each of its values, even in strict mode."""
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


@pytest.mark.parametrize(
    "fields", [{"temperature": "hot"}, {"max_tokens": 0}, {"n": 1.5}, {"messages": []}], ids=str
)
def test_a_wrong_value_is_still_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        read_body(ChatRequest, body(**{**FOREIGN, **fields}), Ignored(lenient=True))
    assert caught.value.param == next(iter(fields))


def test_warnings_are_bounded() -> None:
    many = {f"field_{number}": 1 for number in range(5000)}
    ignored = Ignored()
    read_body(ChatRequest, body(**many), ignored)
    assert len(ignored) == MAX_WARNINGS


def test_fields_of_messages_and_parts_too() -> None:
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}, "tone": 1}
    messages = [{"role": "user", "name": "Ann", "content": [part], "mood": "good"}]
    ignored = Ignored()
    assert read_messages(messages, ignored).messages == [{"role": "user", "content": "hello"}]
    assert ignored == [
        "Unknown parameter: 'messages[0].mood'.",
        "Unknown parameter: 'messages[0].content[0].tone'.",
    ]
    with pytest.raises(ApiError, match="mood"):
        read_messages(messages)
    audio = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]
    with pytest.raises(ApiError, match="input_audio"):
        read_messages(audio, Ignored(lenient=True))


@pytest.fixture(scope="module")
def lenient(server: Server) -> Iterator[FrontEnd]:
    with FrontEnd.over(server, FrontOptions(port=0, lenient=True)) as running:
        yield running


@needs_triton
def test_what_is_left_out_is_counted_and_logged_once(front: FrontEnd, server: Server) -> None:
    def count() -> float:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{front.port}/v1/metrics", timeout=30
        ) as reply:
            line = re.search(
                r"^canvasrt_openai_ignored_fields_total (\S+)", reply.read().decode(), re.M
            )
        return float(line[1]) if line else 0

    before = count()
    asked: dict[str, Any] = {
        "model": "canvasrt",
        "messages": QUESTION,
        "extra_body": SAME | {"odd": 1},
    }
    with OpenAI(base_url=front.url, api_key="none", max_retries=0) as client:
        for _ in range(2):
            client.chat.completions.create(**asked)
    assert count() - before == 2


@needs_triton
def test_the_answer_is_the_same_and_has_the_warnings(lenient: FrontEnd, openai: OpenAI) -> None:
    asked = {"model": "canvasrt", "messages": QUESTION}
    with pytest.raises(sdk.BadRequestError):
        openai.chat.completions.create(**asked, extra_body={**SAME, **FOREIGN})
    plain = openai.chat.completions.create(**asked, extra_body=SAME)
    with OpenAI(base_url=lenient.url, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**asked, extra_body={**SAME, **FOREIGN})
        assert answer.choices == plain.choices
        own = (answer.model_extra or {})["canvasrt"]
        assert own["seed"] == 7
        assert len(own["warnings"]) == 3
        chunks = list(
            client.chat.completions.create(**asked, stream=True, extra_body={**SAME, **FOREIGN})
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == plain.choices[0].message.content
        assert (chunks[0].model_extra or {})["canvasrt"] == own
        clean = client.chat.completions.create(**asked, extra_body=SAME)
        assert (clean.model_extra or {})["canvasrt"] == {"seed": 7}
        text = client.completions.create(model="canvasrt", prompt="12", suffix="b", max_tokens=4)
        assert "suffix" in (text.model_extra or {})["canvasrt"]["warnings"][0]


@needs_triton
def test_a_strict_server_refuses_what_it_does_not_know(server: Server) -> None:
    asked: dict[str, Any] = {"model": "canvasrt", "messages": QUESTION}
    with (
        FrontEnd.over(server, FrontOptions(port=0, strict=True)) as front,
        OpenAI(base_url=front.url, api_key="none", max_retries=0) as client,
    ):
        assert client.chat.completions.create(**asked, extra_body=SAME).choices
        with pytest.raises(sdk.BadRequestError, match="Unknown parameter: 'odd'"):
            client.chat.completions.create(**asked, extra_body=SAME | {"odd": 1})


@needs_triton
def test_responses_and_ollama(lenient: FrontEnd) -> None:
    def post(path: str, **fields: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{lenient.port}{path}",
            json.dumps({"model": "canvasrt", **fields}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())

    own = {"max_denoising_steps": 4, "max_output_tokens": 8, "seed": 1}
    response = post("/v1/responses", input="12", background=True, safety="no", **own)
    assert len(response["canvasrt"]["warnings"]) == 2
    options = {"repeat_penalty": 1.5, "mirostat": 2, "top_k": 40, "num_predict": 8, "seed": 1}
    asked = {"messages": QUESTION, "stream": False, "suffix": "x", "options": options}
    answer = post("/api/chat", **asked)
    assert [each.split()[0] for each in answer["canvasrt"]["warnings"]] == [
        "suffix",
        "options.repeat_penalty",
        "options.mirostat",
    ]
    with pytest.raises(urllib.error.HTTPError) as caught:
        post("/api/chat", messages=QUESTION, options={**options, "temperature": "hot"})
    assert caught.value.code == 400
