"""Ollama's API through the real `ollama` client. The model answers from a script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from canvasrt.containers.openai.ollama import _messages
from tests.helpers.agents import WEATHER
from tests.helpers.scripted import Script, Served
from tests.helpers.serving import needs_triton

ollama = pytest.importorskip("ollama")
pytestmark = needs_triton
LONG = [{"role": "user", "content": "x" * 300}]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(acting_server: Served) -> Iterator[Any]:
    return ollama.Client(host=acting_server.front.url.removesuffix("/v1"), timeout=60)


def test_a_chat_whole_and_streamed(client: Any, acting: Script) -> None:
    options = acting.choose("thinks")
    whole = client.chat("canvasrt", HELLO, options=options, think=True)
    assert whole.message.content == "Hello there."
    assert whole.message.thinking == "They greet me."
    assert (whole.done, whole.done_reason) == (True, "stop")
    assert whole.eval_count > 20
    assert (whole.load_duration, whole.prompt_eval_duration) == (0, 0)
    lines = list(client.chat("canvasrt:latest", HELLO, options=options, think=True, stream=True))
    assert "".join(each.message.content for each in lines) == "Hello there."
    assert "".join(each.message.thinking or "" for each in lines) == "They greet me."
    assert [each.done for each in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].prompt_eval_count == whole.prompt_eval_count


def test_tools(client: Any, acting: Script) -> None:
    options = acting.choose("calls")
    message = client.chat("canvasrt", HELLO, tools=[WEATHER], options=options).message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == (
        "weather",
        {"city": "Paris", "days": 2},
    )
    chat = [*HELLO, message, {"role": "tool", "tool_name": "weather", "content": "sunny"}]
    answer = client.chat("canvasrt", chat, tools=[WEATHER], options=options)
    assert answer.message.content == "It is sunny in Paris."


@pytest.mark.parametrize(
    ("results", "ids"),
    [
        ([{}, {}], ["1.0", "1.1"]),
        ([{"tool_name": "clock"}, {"tool_name": "weather"}], ["1.1", "1.0"]),
        ([{"tool_name": "clock"}], ["1.1"]),  # there is no result of `weather`
        ([{"tool_name": "other"}, {}, {}], ["1.0", "1.1", "unknown"]),
        ([{"tool_call_id": "b"}, {"tool_call_id": "a"}], ["b", "a"]),
    ],
)
def test_results_belong_to_their_calls(results: list[Any], ids: list[str]) -> None:
    given = ["a", "b"] if "tool_call_id" in results[0] else [None, None]
    calls = [
        {"id": id, "function": {"name": name, "arguments": {}}}
        for id, name in zip(given, ("weather", "clock"), strict=True)
    ]
    told = [{"role": "tool", "content": "it", **each} for each in results]
    chat = [*HELLO, {"role": "assistant", "content": "", "tool_calls": calls}, *told]
    read = _messages(chat)
    assert [each["tool_call_id"] for each in read[2:]] == ids


def test_images_precede_their_text() -> None:
    (read,) = _messages([{"role": "user", "content": "color?", "images": ["aGk="]}])
    assert [part["type"] for part in read["content"]] == ["image_url", "text"]


def test_completions(client: Any, acting: Script) -> None:
    options = acting.choose("plain")
    assert client.generate("canvasrt", "Hello", options=options).response == "Hello there."
    raw = client.generate("canvasrt", "Hello", raw=True, options=options)
    assert raw.response == "Hello there."
    assert raw.prompt_eval_count == 5
    lines = list(
        client.generate("canvasrt", "Hello", system="be brief", options=options, stream=True)
    )
    assert "".join(each.response for each in lines) == "Hello there."
    short = client.generate("canvasrt", "Hello", options={**options, "num_predict": 4})
    assert (short.response, short.done_reason) == ("Hell", "length")


def test_models(client: Any, acting_server: Served) -> None:
    for listed in (client.list(), client.ps()):
        assert [each.model for each in listed.models] == ["canvasrt"]
    shown = client.show("canvasrt:latest")
    assert "tools" in shown.capabilities
    # GitHub Copilot reads the name and the version.
    assert shown.modelinfo["general.basename"] == "canvasrt"
    version = httpx2.get(f"{acting_server.front.url.removesuffix('/v1')}/api/version").json()
    assert [int(each) for each in version["version"].split(".")] >= [0, 6, 4]
    for loaded in (client.chat("canvasrt", []), client.generate("canvasrt")):
        assert (loaded.done, loaded.done_reason) == (True, "load")
    assert next(iter(client.generate("canvasrt", stream=True))).done


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_predict": 32760}, "exceed the context"),
        ({"temperature": -1}, r"^options\.temperature is -1"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_refuses_is_in_its_form(
    client: Any, stream: bool, options: Any, says: str
) -> None:
    with pytest.raises(ollama.ResponseError, match=says) as error:
        list(client.chat("canvasrt", LONG, options=options, stream=stream))
    assert error.value.status_code == 400
