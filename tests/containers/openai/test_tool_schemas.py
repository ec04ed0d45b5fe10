"""Arguments of tool calls follow the tools' schemas. The model's weights are random, so only the grammar can cause
it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel
from tokenizers import Tokenizer as Core

from canvasrt.bundle import load_bundle
from canvasrt.checkpoints.locate import DEMO_FOLDER
from canvasrt.containers.openai.chat import chat_generation
from canvasrt.containers.openai.tools import ChatRequest, schemas, tools_grammar
from canvasrt.export.graphs import export_graphs
from canvasrt.runtime.answers.grammar import Vocabulary, compile_grammar
from canvasrt.runtime.answers.tool_grammar import call_grammar
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers.quantized_checkpoints import SMALL, without_vision
from tests.helpers.random_models import random_model
from tests.helpers.scripted import client_of, core, gemma_template, serving
from tests.helpers.serving import needs_triton

pytestmark = needs_triton
HELLO: Any = [{"role": "user", "content": "Hello"}]
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 5},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["metric", "imperial"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FLAG = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"weather": CITY, "lamp": FLAG}
FEW: Any = {"max_denoising_steps": 3}
OPENING = str(core().token_to_id("<|tool_call>"))


def tool(name: str, **more: Any) -> Any:
    function = {"name": name, "parameters": SCHEMAS[name], **more}
    return {"type": "function", "function": function}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """The real client of a server whose model has random weights, and Gemma's tokens and template."""
    folder = tmp_path_factory.mktemp("agent")
    checkpoint, tokenizer = folder / "checkpoint", core()
    model = random_model({**SMALL, "vocab_size": tokenizer.get_vocab_size()}, canvas=64)
    for name, token in {"boi": "<|image>", "image": "<|image|>", "eoi": "<image|>"}.items():
        setattr(model.config, f"{name}_token_id", tokenizer.token_to_id(token))
    model.save_pretrained(checkpoint)
    without_vision(checkpoint)
    ends = [tokenizer.token_to_id(each) for each in ("<eos>", "<turn|>", "<|tool_response>")]
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text('{"bos_token": "<bos>"}')
    (checkpoint / "chat_template.jinja").write_text(gemma_template())
    export_graphs(str(checkpoint), folder / "graphs")
    with serving(load_bundle(folder / "graphs", check=False)) as served, client_of(served) as made:
        yield made


def ask(client: OpenAI, **options: Any) -> Any:
    given = {"max_tokens": 256, "seed": 1, "extra_body": FEW, **options}
    return client.chat.completions.create(model="canvasrt", messages=HELLO, **given).choices[0]


def valid(calls: Any) -> int:
    """Check every call against its tool's schema; return the number of calls."""
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return len(calls)


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("strict", [None, True])
def test_a_named_tool(client: OpenAI, strict: bool | None) -> None:
    tools = [tool("lamp"), tool("weather", strict=strict)]
    choice = ask(client, tools=tools, tool_choice=NAMED)
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert valid([call])
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_tool(client: OpenAI, parallel: bool) -> None:
    """A bias makes the model open another call wherever it may."""
    options: Any = {"tool_choice": "required", "parallel_tool_calls": parallel}
    options["extra_body"] = {**FEW, "logit_bias": {OPENING: 100}}
    choice = ask(client, tools=[tool("lamp"), tool("weather")], **options)
    assert (valid(choice.message.tool_calls) > 1) == parallel
    assert choice.message.content is None


def test_a_call_comes_without_strict_and_in_the_smallest_budget(client: OpenAI) -> None:
    """A smaller budget is refused with a message that gives the smallest. `/v1/responses` behaves the same."""
    loose = tool("lamp", strict=False)
    asked: dict[str, Any] = {"tools": [loose], "tool_choice": "required"}
    with pytest.raises(BadRequestError, match="at least") as caught:
        ask(client, **asked, max_tokens=3)
    assert caught.value.param == "max_tokens"
    least = int(re.findall(r"at least (\d+)", str(caught.value))[0])
    (call,) = ask(client, **asked, max_tokens=least).message.tool_calls
    assert valid([call])
    flat: Any = {"type": "function", **loose["function"]}
    for choice in ("required", {"type": "function", "name": "lamp"}):
        reply = client.responses.create(
            model="canvasrt", input="Hello", tools=[flat], tool_choice=choice, extra_body=FEW
        )
        assert reply.output[0].name == "lamp"  # type: ignore[union-attr]


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "lamp"}, {"type": "any"}])
def test_anthropics_messages_call_them(client: OpenAI, choice: Any) -> None:
    tools = [{"name": "lamp", "input_schema": FLAG}]
    body = {"model": "canvasrt", "max_tokens": 256, "messages": HELLO, "tools": tools, **FEW}
    reply = httpx.post(
        f"{client.base_url}messages", json={**body, "tool_choice": choice}, timeout=60
    )
    message = reply.json()
    assert (message["content"][-1]["name"], message["stop_reason"]) == ("lamp", "tool_use")


class Lamp(BaseModel):
    on: bool


def test_the_streaming_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="canvasrt",
        messages=HELLO,
        tools=[pydantic_function_tool(Lamp, name="lamp")],
        tool_choice="required",
        max_tokens=256,
        seed=1,
        extra_body=FEW,
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in events
    for call in final.choices[0].message.tool_calls or ():
        assert isinstance(call.function.parsed_arguments, Lamp)


def test_every_token_that_ends_an_answer_counts(client: OpenAI) -> None:
    """As in the released model, the token that begins a result follows a call, and then padding. Only one position of
    the first canvas is left for this token."""
    function = {"name": "lamp", "parameters": {"type": "object", "additionalProperties": False}}
    ends = {str(core().token_to_id(each)): 100 for each in ("<|tool_response>", "<pad>")}
    choice = ask(
        client,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        extra_body={**FEW, "canvas_length": 8, "logit_bias": {**ends, OPENING: 98}},
    )
    assert len(choice.message.tool_calls) == 1


def test_a_strict_tool_that_may_be_called(client: OpenAI) -> None:
    """A logit bias makes the model begin a call. The grammar determines the rest."""
    extra = {**FEW, "logit_bias": {OPENING: 40}}
    tools = [tool("weather", strict=True)]
    assert valid(ask(client, tools=tools, extra_body=extra).message.tool_calls)
    extra["logit_bias"] = {OPENING: -100}
    free = ask(client, tools=tools, extra_body=extra)
    assert not free.message.tool_calls
    assert free.message.content
    extra["logit_bias"][str(core().token_to_id("<turn|>"))] = -100
    endless = ask(client, tools=tools, extra_body=extra, max_tokens=20)
    assert endless.finish_reason == "length"


FORM: Any = {"type": "json_schema", "json_schema": {"name": "flag", "schema": FLAG}}


def test_an_answer_of_a_format_or_a_call(client: OpenAI) -> None:
    """A logit bias decides whether the model begins a call."""
    asked: Any = {"tools": [tool("weather", strict=True)], "response_format": FORM}
    called = ask(client, **asked, extra_body={**FEW, "logit_bias": {OPENING: 40}})
    assert valid(called.message.tool_calls)
    free = ask(client, **asked, extra_body={**FEW, "logit_bias": {OPENING: -100}})
    jsonschema.validate(json.loads(free.message.content), FLAG)
    assert not free.message.tool_calls
    with pytest.raises(BadRequestError, match="regex is not supported with tools") as caught:
        ask(client, **asked | {"response_format": {"type": "regex", "regex": "a"}})
    assert caught.value.param == "response_format.regex"


@pytest.mark.parametrize(
    ("form", "content"),
    [(FORM, '{"on":'), ({"type": "regex", "regex": "so it is"}, "so it is")],
    ids=["schema", "regex"],
)
def test_a_formatted_answer_after_a_result_is_no_thought(
    client: OpenAI, form: Any, content: str
) -> None:
    """After a tool's result, the template would begin a thought, which a formatted answer could not end."""
    call = {"id": "1", "type": "function", "function": {"name": "lamp", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": "done"}
    messages: Any = [*HELLO, {"role": "assistant", "tool_calls": [call]}, result]
    reply = client.chat.completions.create(
        model="canvasrt",
        messages=messages,
        response_format=form,
        extra_body={**FEW, "enable_thinking": True},
    )
    message = reply.choices[0].message.to_dict()
    assert message["content"].startswith(content)
    assert "reasoning_content" not in message


def test_what_cannot_be_enforced(client: OpenAI) -> None:
    unknown = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    strict = {"type": "function", "function": {"name": "f", "parameters": unknown, "strict": True}}
    loose = {"type": "function", "function": {"name": "f", "parameters": unknown}}
    with pytest.raises(BadRequestError, match="uniqueItems") as caught:
        ask(client, tools=[strict], tool_choice="required")
    assert caught.value.param == "tools"
    ask(client, tools=[loose], tool_choice="required")
    with pytest.raises(BadRequestError, match="logprobs is not supported"):
        ask(client, tools=[tool("lamp", strict=True)], tool_choice="required", logprobs=True)
    for name, value in {"settle_steps": 1, "redo_below": -1.0, "score_blocks": True}.items():
        with pytest.raises(BadRequestError, match=f"{name} is not supported"):
            ask(client, tools=[tool("lamp")], tool_choice="required", extra_body={name: value})


@pytest.mark.parametrize(
    ("strict", "choice", "enforced"),
    [
        (None, "auto", False),
        (True, "auto", True),
        (False, "auto", False),
        (None, "required", True),
        (False, "required", True),
        (None, NAMED, True),
        (False, NAMED, True),
        (True, "none", False),
    ],
)
def test_when_it_is_enforced(strict: bool | None, choice: Any, enforced: bool) -> None:
    body = {"model": "m", "messages": HELLO, "tool_choice": choice}
    request = ChatRequest(**body, tools=[tool("weather", strict=strict)])
    assert (tools_grammar(request) is not None) == enforced
    inputs = chat_generation(request).options
    request.response_format = {"type": "text"}  # means no format
    assert chat_generation(request).options == inputs


def test_only_allowed_tools_may_be_called() -> None:
    allowed = {"mode": "required", "tools": [NAMED]}
    body: dict[str, Any] = {
        "model": "m",
        "messages": HELLO,
        "tools": [tool("lamp"), tool("weather")],
    }
    body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    request = ChatRequest(**body)
    assert request.tool_choice == "required"
    grammar = tools_grammar(request)
    assert grammar is not None
    assert set(grammar["tools"]) == {"weather"}
    assert set(schemas(request) or ()) == {"weather"}


LAMP = 'call:lamp{"on":true}<tool_call|>'
TWO = 'lamp{"on":false}<tool_call|><|tool_call>' + LAMP


@pytest.mark.parametrize(
    ("begun", "text", "answer", "fits"),
    [
        ("name", '{"on":true}<tool_call|>', None, True),
        ("name", '{"on":1}<tool_call|>', None, False),
        ("call", TWO, None, True),
        ("call", 'light{"on":false}<tool_call|>', None, False),
        ("nothing", f"Hm.<|tool_call>{LAMP}", None, True),
        ("nothing", "<|channel>thought\nso<channel|>Just text, call:lamp{} and all", None, True),
        ("nothing", "Hm.<|tool_call>lamp", None, False),
        ("nothing", f"Hm.<|tool_call>{LAMP}more", None, False),
        ("nothing", '{"on":true}', FLAG, True),
        ("nothing", f"<|tool_call>{LAMP}", FLAG, True),
        ("nothing", f'{{"on":true}}<|tool_call>{LAMP}', FLAG, False),
        ("nothing", "Hm.", FLAG, False),
    ],
)
def test_the_grammar(begun: str, text: str, answer: Any, fits: bool) -> None:
    assert accepts(core(), begun, text, answer) == fits


@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_second_call_follows_unless_the_request_forbids_it(parallel: bool | None) -> None:
    body: Any = {"model": "m", "messages": HELLO, "tools": [tool("lamp")]}
    body |= {"tool_choice": "required", "parallel_tool_calls": parallel}
    grammar = tools_grammar(ChatRequest(**body)) or {}
    assert accepts(core(), "call", TWO, parallel=grammar["parallel"]) == (parallel is not False)


def test_the_demo_calls_without_thoughts() -> None:
    demo = Core.from_file(str(DEMO_FOLDER / "checkpoint" / "tokenizer.json"))
    assert accepts(demo, "nothing", f"Hm.<|tool_call>{LAMP}")
    assert not accepts(demo, "nothing", "Hm.<|tool_call>call:lamp{}<tool_call|>")


def accepts(core: Core, begun: str, text: str, answer: Any = None, parallel: bool = True) -> bool:
    """Return whether the grammar of calls to `lamp` accepts the whole `text`."""
    tokenizer = Tokenizer(core, None)
    spec = {"tools": {"lamp": FLAG}, "begun": begun, "parallel": parallel, "strict": True}
    grammar = call_grammar({**spec, "answer": answer}, tokenizer)
    control = frozenset(core.get_added_tokens_decoder())
    words = Vocabulary(tokenizer, core.get_vocab_size(), (1,), control)
    state = compile_grammar({"type": "grammar", "grammar": grammar}, words, "grammar")
    for token in tokenizer.encode(text, False):
        if token not in state.allowed():
            return False
        state = state.advanced(token)
    return bool(state.accepts)
