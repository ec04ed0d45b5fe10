"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, whose requests are converted to chats."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field
from typing_extensions import TypedDict

from canvasrt.containers.client.triton import StreamEvent
from canvasrt.containers.openai.body import (
    ImageTokens,
    Messages,
    Sampling,
    Strict,
    Strings,
    translated,
)
from canvasrt.containers.openai.chat import chat_generation
from canvasrt.containers.openai.endpoint import Endpoint
from canvasrt.containers.openai.errors import (
    AnthropicError,
    ApiError,
    bad_request,
    in_anthropics_form,
    rename,
)
from canvasrt.containers.openai.fields import ANTHROPIC, Table
from canvasrt.containers.openai.generation import (
    Answer,
    Generation,
    Reply,
    Served,
    finish_reason,
    own_parts,
)
from canvasrt.containers.openai.messages import has_images
from canvasrt.containers.openai.parse_answer import Piece
from canvasrt.containers.openai.tools import MAX_TOOLS, ChatRequest
from canvasrt.containers.tensors import MAX_STOPS
from canvasrt.errors import CanvasError
from canvasrt.runtime.sampling_params import check_sampling
from canvasrt.types import Json

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_BLOCKS = {"content": ("text", "text"), "reasoning": ("thinking", "thinking")}
# Patterns of a chat's field names → Anthropic's field names.
_NAMES = {
    r"messages\[\d+\](\.content\[\d+\])?": "messages",
    r"image_url\.url": "source",
    r"response_format(\.json_schema)?": "output_config.format",
    r"^stop\b": "stop_sequences",
    r"\.function\.parameters": ".input_schema",
    r"\.function\.": ".",
    "enable_thinking": "thinking",
}


class OutputConfig(Strict):
    """`output_config`."""

    format: Json | None = None


class MessagesRequest(Sampling):
    """The body of `POST /v1/messages`."""

    table: ClassVar[Table] = ANTHROPIC

    messages: Messages
    system: str | Annotated[list[Json], Field(fail_fast=True)] | None = None
    stop_sequences: Annotated[Strings, Field(max_length=MAX_STOPS)] | None = None
    tools: Annotated[list[Json], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: OutputConfig | None = None
    output_format: Json | None = None  # older clients send this instead of output_config.format
    image_tokens: ImageTokens = None


class Message(TypedDict):
    """An answer."""

    id: str
    type: str
    role: str
    model: str
    content: list[Json]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Json


class Counted(TypedDict):
    """The reply: how many tokens the prompt has."""

    input_tokens: int


def messages_generation(body: MessagesRequest) -> Generation:
    """Return the generation of the equivalent chat. If a field is wrong, raises an ApiError that names that field."""
    return chat_generation(_chat(body))


def count(body: MessagesRequest) -> Generation:
    """Return the generation that only encodes the prompt, to count its tokens. Raises ApiError for a wrong field, and
    for any image, because an image's number of tokens depends on its size."""
    asked = messages_generation(body)
    try:
        check_sampling(asked.options)
    except CanvasError as error:
        wrong = bad_request(f"{error.message}: {error.hint}.", error.message.partition(" ")[0])
        rename(wrong, asked.names)
        raise wrong from None
    if has_images(asked.messages or []):
        raise bad_request("The tokens of images cannot be counted: send text.")
    options = {"tokenize": json.dumps({"spell": False, "add_generation_prompt": True})}
    if "template" in asked.options:
        options["template"] = asked.options["template"]
    return replace(asked, options=options, seed=0, plain=True, n=1)


def _chat(body: MessagesRequest) -> ChatRequest:
    fields = body.model_dump(include=set(Sampling.model_fields), exclude_none=True)
    fields |= {"stop": body.stop_sequences, "image_tokens": body.image_tokens}
    fields["messages"] = _messages(body)
    fields["tools"] = _tools(body)
    choice = body.tool_choice or {}
    if choice.get("type") == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice:
        fields["tool_choice"] = _CHOICES.get(str(choice.get("type")), choice.get("type"))
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    if body.thinking is not None:
        fields["enable_thinking"] = body.thinking.get("type") != "disabled"
    form = (body.output_config and body.output_config.format) or body.output_format
    if form is not None:
        schema = {"schema": form.get("schema")}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return translated(ChatRequest, fields, body)


def _tools(body: MessagesRequest) -> list[Json] | None:
    """Return the tools in a chat's form. Tools that only Anthropic's servers can run are dropped with a warning; if
    unknown fields are refused, such tools raise ApiError."""
    found = []
    for number, tool in enumerate(body.tools or ()):
        if tool.get("type", "custom") not in ("custom", None):
            message = f"tools.{number} is of type {tool['type']!r}; only custom ones are supported."
            if body.ignored is None:
                raise bad_request(message)
            body.ignored.note(message)
            continue
        function = {k: tool.get(k) for k in ("name", "description", "strict")}
        function["parameters"] = tool.get("input_schema")
        found.append({"type": "function", "function": function})
    return found or None


def _messages(body: MessagesRequest) -> list[Json]:
    """Return the conversation as a chat's messages. Every tool result becomes a separate message."""
    system = _blocks(body.system or [], "system")
    read: list[Json] = [{"role": "system", "content": _texts(system)}] if system else []
    for number, message in enumerate(body.messages):
        where, role = f"messages.{number}", message.get("role")
        blocks = _blocks(message.get("content"), f"{where}.content")
        if role == "assistant":
            read.append(_turn(blocks, f"{where}.content"))
        elif role == "user":
            read += _results(blocks)
            content = [_part(each, path) for path, each in blocks if not _is(each, "tool_result")]
            if content or not blocks:  # an empty message is kept, so that the chat refuses it
                read.append({"role": role, "content": content})
        elif role == "system":
            read.append({"role": role, "content": _texts(blocks)})
        else:
            raise _wrong(f"{where}.role", f"{role!r} is not user, assistant or system")
    if read[-1]["role"] == "assistant":
        raise _wrong(
            "messages", "the last one is the assistant's, but this server cannot continue an answer"
        )
    return read


def _blocks(content: Any, where: str) -> list[tuple[str, Json]]:
    """Return a pair for each block of a message's content: its path in the request, and the block."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise _wrong(where, "it must be a string or a list of blocks")
    return [(f"{where}.{number}", each) for number, each in enumerate(content)]


def _turn(blocks: list[tuple[str, Json]], where: str) -> Json:
    """Return an assistant message of a chat, which contains the thoughts, text and tool calls in `blocks`."""
    thoughts = [each.get("thinking") or "" for _, each in blocks if _is(each, "thinking")]
    calls = [
        {
            "id": each.get("id"),
            "type": "function",
            "function": {
                "name": each.get("name"),
                "arguments": json.dumps(each.get("input")),
            },
        }
        for _, each in blocks
        if _is(each, "tool_use")
    ]
    if not all(isinstance(each, str) for each in thoughts):
        raise _wrong(where, "a thought must be a string")
    told = [one for one in blocks if not _is(one[1], "thinking", "redacted_thinking", "tool_use")]
    turn: Json = {"role": "assistant", "content": _texts(told)}
    if calls:
        turn["tool_calls"] = calls
    return turn | ({"reasoning_content": "".join(thoughts)} if any(thoughts) else {})


def _results(blocks: list[tuple[str, Json]]) -> list[Json]:
    return [
        {
            "role": "tool",
            "tool_call_id": each.get("tool_use_id"),
            "content": _texts(_blocks(each.get("content") or "", f"{path}.content")),
        }
        for path, each in blocks
        if _is(each, "tool_result")
    ]


def _texts(blocks: list[tuple[str, Json]]) -> str:
    for path, each in blocks:
        if not _is(each, "text"):
            raise _wrong(path, f"a block of type {each.get('type')!r} is not supported there")
    return "".join(_part(each, path)["text"] for path, each in blocks)


def _part(block: Json, where: str) -> Json:
    """Return a content block of a message as a content part of a chat."""
    source = block.get("source")
    if _is(block, "text") and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    if _is(block, "image") and isinstance(source, dict):
        url = source.get("url")
        if source.get("type") == "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise _wrong(where, f"a block of type {block.get('type')!r} is not supported there")


def _is(block: Json, *types: str) -> bool:
    return block.get("type") in types


def _wrong(where: str, why: str) -> ApiError:
    return bad_request(f"Invalid {where}: {why}.", where, "invalid_value")


class MessageReply(Reply):
    """Renders the answer as one message in Anthropic's form, block by block."""

    def __init__(self, body: Any, asked: Generation, seed: int, served: Served) -> None:
        super().__init__(body, asked, seed, served)
        self._content: list[Json] = []
        # The kind of piece that the open block holds; empty if no block is open.
        self._open = ""
        self._id = f"msg_{uuid.uuid4().hex}"

    def whole(self, answers: Sequence[Answer]) -> Json:
        final = answers[0].final
        self.add(0, answers[0].pieces, final)
        own = {"canvasrt": {**self.own_fields(), **own_parts(final)}}
        return self._message() | self._stop(final) | {"usage": self._usage()} | own

    def open(self, index: int) -> list[Json]:
        # The message reports 0 tokens, because the prompt's token count is only known at the end.
        return [{"type": "message_start", "message": self._message()}, {"type": "ping"}]

    def add(self, index: int, pieces: list[Piece], event: StreamEvent) -> list[Json]:
        return [event for piece in pieces for event in self._piece(piece)]

    def close(self, index: int, answer: Answer) -> list[Json]:
        events = [*self.add(index, answer.pieces, answer.final), *self._close()]
        stop = {"type": "message_delta", "delta": self._stop(answer.final), "usage": self._usage()}
        return [*events, stop, {"type": "message_stop"}]

    def failed(self, error: ApiError) -> list[Any]:
        return [in_anthropics_form(error)]

    def _message(self) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": self._content[:],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }

    def _stop(self, final: StreamEvent) -> Json:
        if final.stop_string:
            return {"stop_reason": "stop_sequence", "stop_sequence": final.stop_string}
        calls = sum(each["type"] == "tool_use" for each in self._content)
        return {"stop_reason": _STOPS[finish_reason(final, calls)], "stop_sequence": None}

    def _usage(self) -> Json:
        cached = self.usage.cached_tokens
        return {
            "input_tokens": self.usage.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.usage.completion_tokens,
        }

    def _piece(self, piece: Piece) -> Iterator[Json]:
        if piece.call is not None:
            yield from self._close()
            block = {"type": "tool_use", "id": piece.call.id, "name": piece.call.name}
            arguments = piece.call.arguments
            yield from self._begin({**block, "input": {}}, piece.kind)
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            self._content[-1]["input"] = json.loads(arguments)
            return
        kind, name = _BLOCKS[piece.kind]
        if self._open != piece.kind:
            yield from self._close()
            signed = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, name: "", **signed}, piece.kind)
        self._content[-1][name] += piece.text
        yield self._delta({"type": f"{kind}_delta", name: piece.text})

    def _begin(self, block: Json, kind: str) -> Iterator[Json]:
        self._content.append(dict(block))
        self._open = kind
        yield self._in_block("content_block_start", content_block=block)

    def _delta(self, delta: Json) -> Json:
        return self._in_block("content_block_delta", delta=delta)

    def _close(self) -> Iterator[Json]:
        if self._open:
            yield self._in_block("content_block_stop")
        self._open = ""

    def _in_block(self, type: str, **fields: Any) -> Json:
        return {"type": type, "index": len(self._content) - 1, **fields}


class CountReply(Reply):
    """Renders the number of tokens of a prompt."""

    def whole(self, answers: Sequence[Answer]) -> Json:
        return {"input_tokens": len(answers[0].final.prompt_token_ids)}


MESSAGES = Endpoint(
    "/v1/messages",
    "Answer a conversation, in Anthropic's form.",
    MessagesRequest,
    messages_generation,
    MessageReply,
    Message,
    True,
    _NAMES,
    AnthropicError,
)
COUNT = Endpoint(
    "/v1/messages/count_tokens",
    "Return how many tokens a prompt has, in Anthropic's form.",
    MessagesRequest,
    count,
    CountReply,
    Counted,
    names=_NAMES,
    error=AnthropicError,
)
