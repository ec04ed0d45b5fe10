"""`--lenient`: what is not supported is left out, and the reply says so; the answer is the same."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai as sdk
import pytest
from openai import OpenAI

from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.messages import read_messages
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.openai.schema import MAX_WARNINGS, ChatRequest, read_body
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from tests.helpers.serving import needs_triton

QUESTION = [{"role": "user", "content": "12+34="}]
SAME: dict[str, Any] = {"seed": 7, "max_tokens": 40, "max_denoising_steps": 6}
FOREIGN: dict[str, Any] = {"presence_penalty": 0.5, "store": True, "nonsense": {"a": 1}}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "canvasrt", "messages": QUESTION, **fields}).encode()


def test_every_unsupported_parameter_is_left_out_and_named() -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True, "more": 1}}
    read = read_body(ChatRequest, body(**FOREIGN, **stream, temperature=0.5), lenient=True)
    assert read.ignored is not None
    assert sorted(each.split(".")[0] for each in read.ignored) == [
        "Unknown parameter: 'nonsense'",
        "Unknown parameter: 'stream_options",
        "presence_penalty is not supported",
        "store is not supported: nothing is stored here",
    ]
    assert (read.temperature, read.wants_usage, read.store) == (0.5, True, None)
    with pytest.raises(ApiError, match="presence_penalty"):
        read_body(ChatRequest, body(**FOREIGN))


@pytest.mark.parametrize(
    "fields", [{"temperature": "hot"}, {"max_tokens": 0}, {"n": 1.5}, {"messages": []}], ids=str
)
def test_a_wrong_value_is_still_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        read_body(ChatRequest, body(**{**FOREIGN, **fields}), lenient=True)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize("raw", [b"{", b"[]", b"3", b"\xff", b'{"model": "x"}'])
def test_what_is_no_request_is_still_refused(raw: bytes) -> None:
    with pytest.raises(ApiError):
        read_body(ChatRequest, raw, lenient=True)


def test_warnings_are_bounded() -> None:
    many = {f"field_{number}": 1 for number in range(5000)}
    read = read_body(ChatRequest, body(**many), lenient=True)
    assert len(read.ignored or ()) == MAX_WARNINGS


def test_fields_of_messages_and_parts_too() -> None:
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part], "mood": "good"}]
    ignored: list[str] = []
    assert read_messages(messages, ignored).messages == [{"role": "user", "content": "hello"}]
    assert ignored == [
        "messages[0].mood is not supported.",
        "messages[0].content[0].cache_control is not supported.",
    ]
    with pytest.raises(ApiError, match="mood"):
        read_messages(messages)
    audio = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]
    with pytest.raises(ApiError, match="input_audio"):
        read_messages(audio, [])


@pytest.fixture(scope="module")
def lenient(server: Server) -> Iterator[FrontEnd]:
    with FrontEnd.over(server, FrontOptions(port=0, lenient=True)) as running:
        yield running


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
    response = post("/v1/responses", input="12", truncation="auto", safety="no", **own)
    assert len(response["canvasrt"]["warnings"]) == 2
    options = {"repeat_penalty": 1.1, "mirostat": 2, "top_k": 40, "num_predict": 8, "seed": 1}
    asked = {"messages": QUESTION, "stream": False, "suffix": "x", "options": options}
    answer = post("/api/chat", **asked)
    assert answer["canvasrt"]["warnings"] == [
        "suffix is not supported.",
        "options.mirostat is not supported.",
        "options.repeat_penalty is not supported.",
    ]
    with pytest.raises(urllib.error.HTTPError) as caught:
        post("/api/chat", messages=QUESTION, options={**options, "temperature": "hot"})
    assert caught.value.code == 400
