"""The body of `/v1/responses`, read as a chat. Nothing is stored: every request brings its whole
conversation along."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel as _Model
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from canvasrt.containers.openai.errors import ApiError, bad_request
from canvasrt.containers.openai.functions import MAX_TOOLS, Effort
from canvasrt.containers.openai.part_limits import MAX_MESSAGES, Messages
from canvasrt.containers.openai.schema import (
    ChatRequest,
    Note,
    Sampling,
    Whole,
    body_error,
    only,
)

# Names of a chat's parameters → those of a response's.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Reasoning(_Model):
    """`reasoning`. Thoughts are returned as they are, so there are no summaries to choose."""

    model_config = ConfigDict(extra="forbid", strict=True)
    effort: Effort | None = None
    summary: only("auto") = None  # type: ignore[valid-type]
    generate_summary: only("auto") = None  # type: ignore[valid-type]


class Text(_Model):
    """`text`: the format of the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: dict[str, Any] | None = None
    verbosity: only("medium") = None  # type: ignore[valid-type]


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Items = BeforeValidator(
    _items,
    json_schema_input_type=str
    | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)],
)


class ResponsesRequest(Sampling):
    """The body of a response."""

    input: Annotated[Messages, _Items]
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = (
        None
    )
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    image_tokens: int | None = None
    text: Text | None = None
    prompt_cache_retention: Note = None
    include: only([], ["reasoning.encrypted_content"]) = None  # type: ignore[valid-type]

    # What a chat has, and a response does not.
    n: only(1) = None  # type: ignore[valid-type]
    max_tokens: only() = None  # type: ignore[valid-type]
    store: only(False) = None  # type: ignore[valid-type]
    background: only(False) = None  # type: ignore[valid-type]
    truncation: only("disabled") = None  # type: ignore[valid-type]
    previous_response_id: only() = None  # type: ignore[valid-type]
    conversation: only() = None  # type: ignore[valid-type]
    prompt: only() = None  # type: ignore[valid-type]
    max_tool_calls: only() = None  # type: ignore[valid-type]
    logprobs: only(False) = None  # type: ignore[valid-type]
    top_logprobs: only(0) = None  # type: ignore[valid-type]

    @property
    def token_budget(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """Return the chat that gives the same answer. ApiError names what is wrong or not supported."""
    body = request.model_dump(include=set(Sampling.model_fields), exclude_none=True)
    body["messages"] = _messages(request)
    body["max_completion_tokens"] = request.max_output_tokens
    body["tools"] = [_tool(each, f"tools[{i}]") for i, each in enumerate(request.tools or ())]
    choice = request.tool_choice
    if isinstance(choice, dict) and "name" in choice:
        choice = {"type": choice.get("type"), "function": {"name": choice["name"]}}
    body["tool_choice"] = choice
    body["reasoning_effort"] = request.reasoning.effort if request.reasoning else None
    for name in ("parallel_tool_calls", "enable_thinking", "chat_template_kwargs", "image_tokens"):
        body[name] = getattr(request, name)
    body["response_format"] = _format(request.text)
    try:
        chat = ChatRequest.model_validate({k: v for k, v in body.items() if v is not None})
    except ValidationError as error:
        raise renamed(body_error(error)) from None
    chat._ignored = request.ignored
    return chat


def renamed(error: ApiError) -> ApiError:
    """Return a chat's error with the names of a response's parameters."""
    for chat, own in _NAMES.items():
        if error.param and error.param.startswith(chat):
            error.param = own + error.param[len(chat) :]
        error.message = error.message.replace(chat, own)
    return error


def _format(text: Text | None) -> dict[str, Any] | None:
    given = text.format if text else None
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(
            f"{where} is of type {tool.get('type')!r}; only functions are supported.",
            f"{where}.type",
            "unsupported_parameter",
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the conversation as a chat: a thought, text and calls in a row are one message."""
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
            _turn(messages)["reasoning_content"] = text
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
            raise bad_request(
                f"{where} is of type {kind!r}, which is not supported.",
                where,
                "unsupported_parameter",
            )
    for each in messages:
        if "tool_calls" not in each:
            each.setdefault("content", "")  # a thought may be all there was
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
    """Return the model's turn that is being read; a new one if the last has `fresh` already."""
    if not messages or messages[-1]["role"] != "assistant" or fresh in messages[-1]:
        messages.append({"role": "assistant"})
    return messages[-1]


def _part(part: Any, where: str) -> dict[str, Any]:
    """Return a part of a message as a chat has it."""
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
