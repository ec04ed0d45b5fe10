"""Anthropic's API, on the wire and through the real `anthropic` client. The model answers from a script."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from canvasrt.containers.openai.anthropic import (
    MESSAGES,
    MessagesRequest,
    messages_generation,
)
from canvasrt.containers.openai.errors import bad_request, rename
from canvasrt.containers.serve.frontend import FrontEnd
from tests.helpers.agents import WEATHER
from tests.helpers.alone import lone_front
from tests.helpers.scripted import Script, Served
from tests.helpers.serving import needs_triton

anthropic = pytest.importorskip("anthropic")
pytestmark = needs_triton
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA = WEATHER["function"]["parameters"]  # type: ignore[index]
TOOLS: list[Any] = [
    {"name": "weather", "description": "The weather.", "input_schema": SCHEMA},
    {"name": "clock", "input_schema": {"type": "object"}},
]
THINK: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
SAME: Any = {"model": "canvasrt", "max_tokens": 1024}


@pytest.fixture
def client(acting_server: Served) -> Iterator[Any]:
    url = acting_server.front.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def ask(client: Any, acting: Script):
    """Return a function: `ask(script, …)` returns a message."""

    def call(script: str, messages: Any = HELLO, **options: Any) -> Any:
        extra = {**acting.choose(script), **options.pop("extra_body", {})}
        return client.messages.create(messages=messages, extra_body=extra, **{**SAME, **options})

    return call


def test_the_form_on_the_wire(acting_server: Served, acting: Script) -> None:
    url = acting_server.front.url + "/messages"
    body = {**SAME, "messages": HELLO, **acting.choose("calls"), "tools": TOOLS, "stream": True}
    text = httpx.post(url, json=body, timeout=60).text
    events = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    start, ping, block, delta, stop, end, last = events
    id, call = start["message"].pop("id"), block["content_block"].pop("id")
    assert (id[:4], call[:5]) == ("msg_", "call_")
    usage = {"input_tokens": 0, "output_tokens": 0}
    whole = {"type": "message", "role": "assistant", "model": "canvasrt", "content": []}
    whole |= {"stop_reason": None, "stop_sequence": None, "usage": usage}
    assert start == {"type": "message_start", "message": whole}
    assert ping == {"type": "ping"}
    empty = {"type": "tool_use", "name": "weather", "input": {}}
    assert block == {"type": "content_block_start", "index": 0, "content_block": empty}
    part = {"type": "input_json_delta", "partial_json": '{"city": "Paris", "days": 2}'}
    assert delta == {"type": "content_block_delta", "index": 0, "delta": part}
    assert stop == {"type": "content_block_stop", "index": 0}
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["input_tokens"] > 100
    assert last == {"type": "message_stop"}


@pytest.mark.parametrize("script", ["plain", "thinks", "calls", "thinks and calls", "two", "long"])
def test_a_stream_builds_the_whole_message(client: Any, ask: Any, acting: Script, script: str):
    whole = ask(script, tools=TOOLS, **THINK)
    extra = acting.choose(script)
    with client.messages.stream(
        **SAME, messages=HELLO, tools=TOOLS, **THINK, extra_body=extra
    ) as stream:
        final = stream.get_final_message()
    kinds = {"plain": ["text"], "thinks": ["thinking", "text"], "calls": ["tool_use"]}
    assert [each.type for each in whole.content] == kinds.get(script) or script not in kinds
    assert list(map(bare, final.content)) == list(map(bare, whole.content))
    assert final.stop_reason == whole.stop_reason
    totals = [
        (each.usage.input_tokens + each.usage.cache_read_input_tokens, each.usage.output_tokens)
        for each in (whole, final)
    ]
    assert totals[0] == totals[1]


def bare(block: Any) -> dict[str, Any]:
    """Return a block without its random and derived fields."""
    names = ("type", "text", "thinking", "name", "input")
    return {name: getattr(block, name) for name in names if hasattr(block, name)}


def test_the_whole_conversation_goes_back(client: Any, ask: Any, agent: Any, acting: Script):
    first = ask("thinks and calls", tools=TOOLS, **THINK)
    thought, call = first.content
    text = {"type": "text", "text": "sunny", "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [text]}
    messages = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    told = {"tools": TOOLS, "system": [{**text, "text": "Be brief."}], **THINK}
    answer = ask("thinks and calls", messages, **told)
    assert (answer.content[-1].text, answer.stop_reason) == ("It is sunny in Paris.", "end_turn")
    functions = [
        {
            "name": each["name"],
            "description": each.get("description"),
            "parameters": each["input_schema"],
        }
        for each in TOOLS
    ]
    made = {"name": call.name, "arguments": json.dumps(call.input)}
    chat = agent.chat.completions.create(
        model="canvasrt",
        messages=[
            {"role": "system", "content": "Be brief."},
            *HELLO,
            {
                "role": "assistant",
                "reasoning_content": thought.thinking,
                "tool_calls": [{"id": call.id, "type": "function", "function": made}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ],
        tools=[{"type": "function", "function": each} for each in functions],
        extra_body={**acting.choose("thinks and calls"), "enable_thinking": True},
    )
    usage = answer.usage
    assert chat.usage.prompt_tokens == usage.input_tokens + usage.cache_read_input_tokens
    counted = client.messages.count_tokens(
        model="canvasrt", messages=messages, tools=TOOLS, system="Be brief.", **THINK
    )
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_names_of_tools_may_be_long(ask: Any) -> None:
    """Claude Code joins the names of a plugin, a server and a tool to such a name."""
    tool = {"name": "mcp__" + "x" * 123, "input_schema": SCHEMA}
    assert ask("plain", tools=[tool]).content[0].text == "Hello there."


def test_no_tools_may_be_chosen(ask: Any) -> None:
    assert ask("calls", tools=TOOLS, tool_choice={"type": "none"}).content[0].type == "text"


def test_limits(ask: Any) -> None:
    short = ask("plain", max_tokens=4)
    assert (short.content[0].text, short.stop_reason) == ("Hell", "max_tokens")
    assert short.usage.output_tokens == 4
    stopped = ask("plain", stop_sequences=["no", "the"])
    assert stopped.content[0].text == "Hello "
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "the")
    answer = ask("plain", tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert "web_search" in answer.canvasrt["warnings"][0]


def test_formats(front: FrontEnd) -> None:
    """The model's weights are random, so it follows a schema only because of the grammar."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    for field in ({"output_config": {"format": form}}, {"output_format": form}):
        body = {**SAME, "max_tokens": 40, "messages": HELLO, **field}
        reply = httpx.post(f"{front.url}/messages", json=body, timeout=60).json()
        assert json.loads(reply["content"][0]["text"]) == {"a": 1}


def test_images_are_a_chats() -> None:
    """In both of the API's forms, images become images of the chat."""
    sources = [
        {"type": "base64", "media_type": "image/png", "data": "aGk="},
        {"type": "url", "url": "https://example.com/a.png"},
    ]
    blocks = [
        *({"type": "image", "source": each} for each in sources),
        {"type": "text", "text": "?"},
    ]
    body = MessagesRequest(model="", messages=[{"role": "user", "content": blocks}])
    (message,) = messages_generation(body).messages or ()
    urls = [each["image_url"]["url"] for each in message["content"][:2]]
    assert urls == ["data:image/png;base64,aGk=", "https://example.com/a.png"]


def test_a_refusal_of_thoughts_names_its_field() -> None:
    message = "enable_thinking is not a variable: leave out enable_thinking."
    error = bad_request(message, "enable_thinking")
    assert rename(error, MESSAGES.names)
    assert error.message == "thinking is not a variable: leave out thinking."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 1 << 20}, "max_tokens"),
        ({"output_config": {"format": {"schema": {"type": "x"}}}}, r"output_config\.format"),
        # On this message, Claude Code asks for fewer tokens or compacts the conversation.
        (
            {"messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 32760},
            r"^input length and `max_tokens` exceed context limit: \d+ \+ 32768 > 32768\b",
        ),
        ({"messages": [{"role": "user", "content": "x" * 33000}]}, "^prompt is too long: "),
        ({"messages": [{"role": "user", "content": "x" * 300_000}]}, "^prompt is too long: "),
    ],
    ids=["a budget", "a schema", "a long answer", "a long prompt", "a very long prompt"],
)
def test_what_the_model_refuses_is_in_its_words(
    ask: Any, fields: dict[str, Any], says: str, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        ask("plain", **fields, stream=stream)
    body = error.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert re.search(says, body["error"]["message"])


def test_a_large_body_s_error_is_in_its_form() -> None:
    with lone_front() as front:
        large = front.post("/v1/messages", content=b" " * (17 << 20))
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
