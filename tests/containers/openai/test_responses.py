"""`/v1/responses` through the real `openai` client. The model answers from a script."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from canvasrt.containers.client.triton import Client
from tests.helpers.agents import CLOCK, WEATHER
from tests.helpers.scripted import Script
from tests.helpers.serving import needs_triton

pytestmark = needs_triton
TOOLS: list[Any] = [{"type": "function", **each["function"]} for each in (WEATHER, CLOCK)]
LOOSE: list[Any] = [{**each, "strict": False} for each in TOOLS]  # the script is not JSON


@pytest.fixture
def ask(agent: OpenAI, acting: Script):
    """Return a function: `ask(script, …)` returns a response, or its events with stream=True."""

    def call(script: str, input: Any = "Hello", **options: Any) -> Any:
        extra = {**acting.choose(script), **options.pop("extra_body", {})}
        options = {"max_output_tokens": 1024, **options}
        return agent.responses.create(model="canvasrt", input=input, extra_body=extra, **options)

    return call


def test_an_answer(ask):
    response = ask("plain", instructions="Be brief.", metadata={"a": "b"})
    assert response.output_text == "Hello there."
    assert (response.status, response.error, response.incomplete_details) == (
        "completed",
        None,
        None,
    )
    assert response.instructions == "Be brief."
    assert response.metadata == {"a": "b"}
    assert response.store is False
    assert response.usage.total_tokens == response.usage.input_tokens + 13


def test_it_is_the_chats_answer(openai: OpenAI, grpc: Client):
    """The model's weights are random, so its answer depends on every token of the prompt."""
    response = openai.responses.create(
        model="canvasrt",
        instructions="be brief",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "12+3="}]},
            {"type": "message", "role": "assistant", "content": "15"},
            {"role": "user", "content": "again"},
        ],
        max_output_tokens=40,
        extra_body={"max_denoising_steps": 6, "seed": 7},
    )
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "12+3="},
        {"role": "assistant", "content": "15"},
        {"role": "user", "content": "again"},
    ]
    same = {"seed": 7, "max_new_tokens": 40, "max_denoising_steps": 6}
    assert response.output_text == grpc.infer({"messages": json.dumps(chat), **same}).text
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"


@pytest.mark.parametrize("script", ["plain", "thinks", "calls", "thinks and calls", "two", "long"])
def test_the_events_build_the_whole_response(ask, script: str):
    whole = ask(script, tools=TOOLS)
    events = list(ask(script, tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed"
    assert [bare(item) for item in last.response.output] == [bare(item) for item in whole.output]
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == list(range(len(whole.output)))
    assert [event.item for event in done] == last.response.output
    for event in done:
        deltas = [
            each.delta
            for each in events
            if each.type.endswith(".delta") and each.item_id == event.item.id
        ]
        assert "".join(deltas) == getattr(event.item, "arguments", None) or text(event.item)


def bare(item: Any) -> dict[str, Any]:
    """Return an item without its random fields."""
    return {k: v for k, v in item.to_dict().items() if k not in ("id", "call_id")}


def text(item: Any) -> str:
    return "".join(part.text for part in item.content)


def test_thoughts_and_calls_are_items(ask):
    response = ask("thinks and calls", tools=TOOLS, reasoning={"effort": "medium"})
    thought, call = response.output
    assert (thought.type, text(thought)) == ("reasoning", "I should look.")
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments) == {"city": "Paris", "days": 2}
    assert response.reasoning.effort == "medium"


def test_the_whole_conversation_goes_back(ask, agent: OpenAI, acting: Script):
    """Stateless clients send the items of a response back as input of the next request."""
    options = {"tools": TOOLS, "reasoning": {"effort": "low"}}
    first = ask("thinks and calls", **options)
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "18"}
    items = [{"role": "user", "content": "Hello"}, *first.output, result]
    answer = ask("thinks and calls", items, **options)
    assert answer.output_text == "It is sunny in Paris."
    call = first.output[-1]
    function = {"name": call.name, "arguments": call.arguments}
    chat = agent.chat.completions.create(
        model="canvasrt",
        messages=[
            {"role": "user", "content": "Hello"},
            {
                "role": "assistant",
                "reasoning_content": "I should look.",
                "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "18"},
        ],
        tools=[WEATHER, CLOCK],
        reasoning_effort="low",
        extra_body=acting.choose("thinks and calls"),
    )
    assert chat.usage.prompt_tokens == answer.usage.input_tokens


def test_a_turn_that_was_only_a_thought_goes_back(ask):
    first = ask("thinks and calls", tools=TOOLS, reasoning={"effort": "low"})
    user = {"role": "user", "content": "Hello"}
    assert ask("thinks and calls", [user, first.output[0], user], tools=TOOLS).output


class weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


def test_the_client_s_stream_helper(agent: OpenAI, acting: Script):
    function = pydantic_function_tool(weather)
    # A call of a strict tool would follow the schema instead of the script.
    tool: Any = {"type": "function", **function["function"], "strict": False}
    options: dict[str, Any] = {"model": "canvasrt", "input": "Hello", "tools": [tool]}
    with agent.responses.stream(**options, extra_body=acting.choose("calls")) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in seen
    assert json.loads(final.output[0].arguments) == {"city": "Paris", "days": 2}
    with agent.responses.stream(**options, extra_body=acting.choose("thinks")) as stream:
        said = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(said) == stream.get_final_response().output_text == "Hello there."


def test_what_only_other_servers_have_is_left_out(ask):
    tools = [{**each, "defer_loading": False, "output_schema": {}} for each in LOOSE]
    answer = ask("plain", "Hello " * 60, tools=[{"type": "web_search"}, *tools])
    assert answer.output_text == "Hello there."
    warnings = (answer.model_extra or {})["canvasrt"]["warnings"]
    assert "web_search" in warnings[0]
    assert "Unknown parameter: 'tools[1].output_schema'." in warnings
    again = ask("plain", "Hello " * 60, tools=tools)  # part of the prompt is cached
    assert 0 < again.usage.input_tokens_details.cached_tokens <= again.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_refuses_has_the_api_s_name(ask, stream: bool):
    with pytest.raises(BadRequestError) as error:
        ask("plain", stream=stream, max_output_tokens=1 << 20)
    assert error.value.body["param"] == "max_output_tokens"
