"""The body of `/v1/responses`, which is converted to a chat. Nothing is stored, so every request must contain the whole
conversation."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from canvasrt.containers.openai.body import (
    MAX_MESSAGES,
    Budget,
    ImageTokens,
    Messages,
    Sampling,
    Strict,
    translated,
)
from canvasrt.containers.openai.chat import chat_generation
from canvasrt.containers.openai.endpoint import Endpoint
from canvasrt.containers.openai.errors import bad_request
from canvasrt.containers.openai.fields import RESPONSE, Table, known
from canvasrt.containers.openai.generation import Generation
from canvasrt.containers.openai.response_events import Response, ResponseReply
from canvasrt.containers.openai.tools import MAX_TOOLS, ChatRequest, Effort, Function

# Patterns of a chat's parameters → their names in `/v1/responses`.
NAMES = {
    r"(?<![\w.])messages(?=\[|$)": "input",  # otherwise an ordinary word
    r"(?<![\w.])max_completion_tokens\b": "max_output_tokens",
    r"(?<![\w.])reasoning_effort\b": "reasoning.effort",
    r"(?<![\w.])response_format(\.json_schema)?\b": "text.format",
}
MAX_REPEATED = 1 << 20  # characters of JSON that a response repeats
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Reasoning(Strict):
    """`reasoning`."""

    effort: Effort | None = None


class Text(Strict):
    """`text`: the format of the answer."""

    format: dict[str, Any] | None = None


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Items = BeforeValidator(
    _items,
    json_schema_input_type=str
    | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)],
)


class ResponsesRequest(Sampling):
    """The body of a response."""

    table: ClassVar[Table] = RESPONSE

    input: Annotated[Messages, _Items]
    instructions: str | None = None
    max_output_tokens: Budget = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = (
        None
    )
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    image_tokens: ImageTokens = None
    text: Text | None = None

    def check(self, size: int) -> None:
        super().check(size)
        # A stream sends the fields of `repeated` three times, and encoding them blocks the event loop.
        if size > MAX_REPEATED and (count := len(json.dumps(self.repeated()))) > MAX_REPEATED:
            raise bad_request(
                f"Without input, the body has {count} characters of JSON; at most {MAX_REPEATED} are allowed.",
                "metadata",
                "invalid_value",
            )

    def repeated(self) -> dict[str, Any]:
        """Return the fields that the response repeats: all except the input and fields that are null."""
        return self.model_dump(exclude={"input"}, exclude_none=True)

    @property
    def token_budget(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens


def response_generation(request: ResponsesRequest) -> Generation:
    """Return the generation of the equivalent chat."""
    body = request.model_dump(include=set(Sampling.model_fields), exclude_none=True)
    body["messages"] = _messages(request)
    body["max_completion_tokens"] = request.max_output_tokens
    body["tools"] = _functions(request)
    choice = request.tool_choice
    if isinstance(choice, dict) and "name" in choice:
        choice = {"type": choice.get("type"), "function": {"name": choice["name"]}}
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [
            {"type": "function", "function": {"name": each.get("name")}}
            for each in (tools if isinstance(tools, list) else ())
            if isinstance(each, dict)
        ]
        allowed = {"mode": choice.get("mode"), "tools": named}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body["tool_choice"] = choice
    body["reasoning_effort"] = request.reasoning.effort if request.reasoning else None
    for name in ("parallel_tool_calls", "enable_thinking", "chat_template_kwargs", "image_tokens"):
        body[name] = getattr(request, name)
    body["response_format"] = _format(request.text)
    return chat_generation(translated(ChatRequest, body, request))


def _format(text: Text | None) -> dict[str, Any] | None:
    given = text.format if text else None
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}


def _functions(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the tools that are functions. Tools that only OpenAI's servers can run are dropped with a warning; if
    unknown fields are refused, such tools raise ApiError."""
    found = []
    for number, tool in enumerate(request.tools or ()):
        where = f"tools[{number}]"
        if tool.get("type") == "function":
            given = {k: v for k, v in tool.items() if k != "type"}
            function = known(given, Function.model_fields, where, RESPONSE, request.ignored)
            found.append({"type": "function", "function": function})
            continue
        message = f"{where} is of type {tool.get('type')!r}; only functions are supported."
        if request.ignored is None:
            raise bad_request(message, f"{where}.type", "unsupported_parameter")
        request.ignored.note(message)
    return found


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the conversation as a chat's messages. Consecutive thoughts, text and calls become one message."""
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    for index, item in enumerate(request.input):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "reasoning":
            text = _text(item.get("content") or item.get("summary") or [], f"{where}.content")
            turn = _turn(messages)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        elif kind == "function_call":
            function = {name: item.get(name) for name in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _turn(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _text(item.get("output"), f"{where}.output")
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            )
        else:
            why = ": nothing is stored here; set store to false" * (kind == "item_reference")
            raise bad_request(
                f"{where} is of type {kind!r}, which is not supported{why}.",
                where,
                "unsupported_parameter",
            )
    for each in messages:
        if "tool_calls" not in each:
            each.setdefault("content", "")  # if the message has nothing but a thought
    return messages


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    role = item.get("role")
    if role == "assistant":
        turn = _turn(messages, fresh="content")
        turn["content"] = _text(item.get("content"), f"{where}.content")
    else:
        content = item.get("content")
        if isinstance(content, list):
            content = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        messages.append({"role": role, "content": content})


def _turn(messages: list[dict[str, Any]], fresh: str = "") -> dict[str, Any]:
    """Return the last message if it is the assistant's and lacks the field `fresh`; otherwise append and return
    a new message."""
    if not messages or messages[-1]["role"] != "assistant" or fresh in messages[-1]:
        messages.append({"role": "assistant"})
    return messages[-1]


def _part(part: Any, where: str) -> dict[str, Any]:
    """Return a content part in a chat's form."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS:
        return {"type": "text", "text": part.get("text")}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        image = {"url": part["image_url"], "detail": part.get("detail")}
        return {"type": "image_url", "image_url": image}
    raise bad_request(
        f"{where} is of type {kind!r}, which is not supported.", where, "unsupported_parameter"
    )


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"Invalid {where}: it must be text.", where, "invalid_type")
    parts = [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if any(not isinstance(part.get("text"), str) for part in parts):
        raise bad_request(f"Invalid {where}: it must be text.", where, "invalid_type")
    return "".join(part["text"] for part in parts)


RESPONSES = Endpoint(
    "/v1/responses",
    "Answer a conversation. Nothing is stored.",
    ResponsesRequest,
    response_generation,
    ResponseReply,
    Response,
    streams=True,
    names=NAMES,
)
