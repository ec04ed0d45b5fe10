"""Thinking and tools through the real server, template and clients. The model answers from a script."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from transformers import PreTrainedTokenizerFast

from canvasrt.containers.client.triton import Client
from canvasrt.containers.openai.messages import read_messages
from canvasrt.errors import CanvasError
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers.agents import CLOCK, WEATHER
from tests.helpers.scripted import Script, Served, core, gemma_template
from tests.helpers.serving import needs_triton

pytestmark = needs_triton
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def ask(agent: OpenAI, acting: Script):
    """Return a function: `ask(script, …)` returns an answer, or its chunks with stream=True."""

    def call(script: str, messages: Any = HELLO, **options: Any) -> Any:
        extra = {**acting.choose(script), **options.pop("extra_body", {})}
        return agent.chat.completions.create(
            model="canvasrt", messages=messages, extra_body=extra, max_tokens=1024, **options
        )

    return call


def test_a_thought_is_apart_from_the_answer(ask):
    message = ask("thinks", reasoning_effort="high").choices[0].message
    assert message.content == "Hello there."
    assert message.reasoning_content == "They greet me."
    # Clients in Rust read vLLM's `reasoning` as the same field, and fail if both are there.
    assert "reasoning" not in message.to_dict()
    assert "reasoning_content" not in ask("plain").choices[0].message.to_dict()


def test_a_thought_is_streamed(ask):
    deltas = [chunk.choices[0].delta for chunk in ask("thinks", stream=True)]
    thought = [d.reasoning_content for d in deltas if getattr(d, "reasoning_content", None)]
    assert "".join(thought) == "They greet me."
    assert not any("reasoning" in each.to_dict() for each in deltas)
    assert "".join(d.content or "" for d in deltas) == "Hello there."


def test_a_call(ask):
    (choice,) = ask("calls", tools=[WEATHER]).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Paris", "days": 2}


@pytest.mark.parametrize("script", ["calls", "thinks and calls", "two", "long"])
def test_streamed_calls_are_the_whole_ones(ask, script: str):
    tools = [WEATHER, CLOCK]
    whole = ask(script, tools=tools).choices[0]
    chunks = list(ask(script, tools=tools, stream=True))
    calls: dict[int, dict[str, str]] = {}
    for delta in (chunk.choices[0].delta for chunk in chunks):
        for part in delta.tool_calls or ():
            if part.id:
                assert part.index == len(calls)
                assert part.type == "function"
                calls[part.index] = {"name": part.function.name, "arguments": ""}
            calls[part.index]["arguments"] += part.function.arguments
    assert list(calls.values()) == [
        {"name": c.function.name, "arguments": c.function.arguments}
        for c in whole.message.tool_calls
    ]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == (whole.message.content or "")
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "tool_calls"


def test_the_result_goes_back(ask):
    tools = [WEATHER, CLOCK]
    message = ask("two", tools=tools).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": content}
        for call, content in zip(message.tool_calls, ["sunny", "noon"], strict=True)
    ]
    answer = ask("two", [*HELLO, message, *results], tools=tools)
    assert answer.choices[0].message.content == "Sunny, and noon."
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_the_template_may_begin_the_thought(ask, stream: bool):
    options = {"tools": [WEATHER], "extra_body": {"enable_thinking": True}}
    message = ask("thinks and calls", **options).choices[0].message
    assert message.reasoning_content == "I should look."
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    answer = ask("thinks and calls", [*HELLO, message, result], stream=stream, **options)
    if stream:
        parts = [chunk.choices[0].delta.to_dict() for chunk in answer]
    else:
        parts = [answer.choices[0].message.to_dict()]
    assert "".join(p.get("reasoning_content") or "" for p in parts) == "Now I know."
    assert "".join(p.get("content") or "" for p in parts) == "It is sunny in Paris."


def test_only_the_first_call_without_parallel_calls(ask):
    message = ask("two", tools=[WEATHER, CLOCK], parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather"]


def test_tools_are_off_when_the_caller_says_so(ask):
    with_tools = ask("plain", tools=[WEATHER])
    without = ask("plain", tools=[WEATHER], tool_choice="none")
    assert without.usage.prompt_tokens == ask("plain").usage.prompt_tokens
    assert without.usage.prompt_tokens < with_tools.usage.prompt_tokens
    message = ask("calls", tools=[WEATHER], tool_choice="none").choices[0].message
    assert message.tool_calls is None


CHATS: dict[str, list[dict[str, Any]]] = {
    "user": HELLO,
    "system": [{"role": "system", "content": "be brief"}, *HELLO],
    "thought of an earlier turn": [
        *HELLO,
        {"role": "assistant", "content": "Hi.", "reasoning_content": "greet"},
        {"role": "user", "content": "again"},
    ],
    "result": [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "look it up",
            "tool_calls": [
                {
                    "id": "call_1",
                    "function": {
                        "name": "weather",
                        "arguments": {"city": 'A "b", {c}', "l": [1, True, None, {"x": 0.5}]},
                    },
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ],
}


@pytest.mark.parametrize("thinking", [None, False, True])
@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["no tools", "tools"])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_prompts_are_those_of_transformers(chat: Any, tools: Any, thinking: bool | None):
    template = gemma_template()
    reference = PreTrainedTokenizerFast(tokenizer_object=core(), bos_token="<bos>")
    variables = {"tools": tools, "enable_thinking": thinking}
    given = {name: value for name, value in variables.items() if value is not None}
    text = reference.apply_chat_template(
        chat, chat_template=template, tokenize=False, add_generation_prompt=True, **given
    )
    tokenizer = Tokenizer(core(), template, {"bos_token": "<bos>"})
    ids, opening = tokenizer.open_chat(chat, variables)
    assert ids == reference.encode(text, add_special_tokens=False)
    after = thinking and chat[-1]["role"] == "tool"
    assert opening == ("<|channel>thought\n" if after else "")
    assert "greet" not in text


def test_text_before_calls_stays_before_them() -> None:
    """The template alone would write the text after the tool's result, and end the model's turn."""
    call = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    told = {"content": "Let me see.", "reasoning_content": "hm", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    chat = read_messages([*HELLO, {"role": "assistant", **told}, result]).messages
    tokenizer = Tokenizer(core(), gemma_template(), {"bos_token": "<bos>"})
    text = core().decode(tokenizer.open_chat(chat, {})[0], skip_special_tokens=False)
    assert text.endswith(
        "<|turn>model\n<|channel>thought\nhm\n<channel|>Let me see.<|tool_call>call:clock{}<tool_call|>"
        '<|tool_response>response:clock{value:<|"|>noon<|"|>}<tool_response|>'
    )
    past = read_messages([*HELLO, {"role": "assistant", **told}, result, *HELLO]).messages
    said, calls = past[len(HELLO) : len(HELLO) + 2]
    # In earlier turns, the template keeps only the thoughts of messages with calls.
    assert (said["content"], calls["reasoning_content"]) == ("Let me see.", "hm")
    assert "reasoning_content" not in said


def test_what_is_sent_is_what_the_template_gets(ask):
    """Messages in OpenAI's form, with arguments as a string, give the same prompt as messages in the template's
    form."""
    reference = PreTrainedTokenizerFast(tokenizer_object=core(), bos_token="<bos>")
    chat = CHATS["result"]
    text = reference.apply_chat_template(
        chat,
        chat_template=gemma_template(),
        tokenize=False,
        add_generation_prompt=True,
        tools=[WEATHER],
        enable_thinking=True,
    )
    sent = json.loads(json.dumps(chat))
    call = sent[1]["tool_calls"][0]
    call["type"] = "function"
    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    answer = ask("calls", sent, tools=[WEATHER], reasoning_effort="low")
    assert answer.usage.prompt_tokens == len(reference.encode(text, add_special_tokens=False))


def test_a_template_without_thoughts_refuses_them_but_ignores_their_effort(openai: OpenAI):
    create = partial(openai.chat.completions.create, model="canvasrt", messages=HELLO, max_tokens=8)
    with pytest.raises(BadRequestError) as error:
        create(extra_body={"enable_thinking": True})
    assert error.value.body["param"] == "enable_thinking"
    plain, high = create(reasoning_effort="none", seed=5), create(reasoning_effort="high", seed=5)
    assert high.choices == plain.choices
    assert "reasoning_effort" in high.model_extra["canvasrt"]["warnings"][0]


def test_tritons_own_callers_get_the_tokens_too(acting_server: Served, acting: Script):
    inputs = {
        "prompt": "Hello",
        "template": json.dumps({"tools": [CLOCK]}),
        **acting.choose("calls"),
    }
    with Client(f"127.0.0.1:{acting_server.server.ports.grpc}", "grpc", timeout=60) as client:
        plain = client.infer(inputs)
        kept = client.infer({**inputs, "control": True})
        assert kept.text.startswith("<|tool_call>call:weather{")
        assert plain.text == kept.text.replace("<|tool_call>", "").replace(
            "<tool_call|>", ""
        ).replace('<|"|>', "")
        begun = client.infer({**inputs, "control": True, "prefix": "So: "})
        assert begun.text == "So: " + kept.text
        assert len(begun.prompt_token_ids) == len(kept.prompt_token_ids) + 4
        for wrong in ({"raw": True}, {"prompt": None, "prompt_ids": [3, 4]}):
            with pytest.raises(CanvasError, match="template has no effect with"):
                client.infer({**inputs, **wrong})
