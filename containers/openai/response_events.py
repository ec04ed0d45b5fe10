"""Renders a response of OpenAI's Responses API: at once, or as the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import TypedDict

from canvasrt.containers.client.triton import StreamEvent
from canvasrt.containers.openai.chunks import OwnFields
from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.generation import (
    Answer,
    Generation,
    Reply,
    Served,
    Usage,
    finish_reason,
    own_parts,
)
from canvasrt.containers.openai.parse_answer import Piece, ToolCall


class Response(TypedDict):
    """A response."""

    id: str
    object: str
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    canvasrt: OwnFields


ResponseEvent = dict[str, Any]
# Kind of piece → type of the output item, type of the item's content, and prefix of the events' names.
_TEXT = {
    "content": ("message", "output_text", "response.output_text"),
    "reasoning": ("reasoning", "reasoning_text", "response.reasoning_text"),
}
_IDS = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


class ResponseReply(Reply):
    """Renders one answer as a response, item by item."""

    text_field = "input"

    def __init__(self, body: Any, asked: Generation, seed: int, served: Served) -> None:
        super().__init__(body, asked, seed, served)
        self._id = _new("resp_")
        self._created = int(time.time())
        self._output: list[dict[str, Any]] = []
        # Kind of the text item that is being written; None if there is none.
        self._open: str | None = None
        self._text = ""
        self._number = 0

    def whole(self, answers: Sequence[Answer]) -> Any:
        return self.close(0, answers[0])[-1]["response"]

    def open(self, index: int) -> list[ResponseEvent]:
        return [
            self._event(f"response.{name}", response=self.response("in_progress"))
            for name in ("created", "in_progress")
        ]

    def add(self, index: int, pieces: list[Piece], event: StreamEvent) -> list[ResponseEvent]:
        return [event for piece in pieces for event in self._piece(piece)]

    def close(self, index: int, answer: Answer) -> list[ResponseEvent]:
        """Return the last events. The very last one holds the whole response."""
        pieces, final = answer
        status = "incomplete" if finish_reason(final) == "length" else "completed"
        events = [*self.add(index, pieces, final), *self._close(status)]
        return [*events, self._event(f"response.{status}", response=self.response(status, final))]

    def failed(self, error: ApiError) -> list[ResponseEvent]:
        response = self.response("failed")
        response["error"] = {"code": "server_error", "message": error.message}
        begin = [] if self._number else self.open(0)  # clients expect `response.created` first
        return [*begin, self._event("response.failed", response=response)]

    def response(self, status: str, final: StreamEvent | None = None) -> dict[str, Any]:
        """Return the response in its current state."""
        given = self.body.repeated()
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        steps = self.usage.denoising_steps
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata", {}),
            "model": self.body.model,
            "output": list(self._output),
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": {"effort": given.get("reasoning", {}).get("effort"), "summary": None},
            "store": False,
            "temperature": given.get("temperature"),
            "text": {"format": {"type": "text"}, **given.get("text", {})},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": given.get("top_p"),
            "truncation": "disabled",
            "usage": {**usage_of(self.usage), "denoising_steps": steps} if final else None,
            "user": given.get("user"),
            "canvasrt": {**self.own_fields(), **(own_parts(final) if final else {})},
        }

    def _piece(self, piece: Piece) -> Iterator[ResponseEvent]:
        if piece.call is not None:
            yield from self._close()
            yield from self._call(piece.call)
            return
        if self._open != piece.kind:
            yield from self._close()
            yield from self._begin_text(piece.kind)
        self._text += piece.text
        extra: dict[str, Any] = {"logprobs": []} if piece.kind == "content" else {}
        name = _TEXT[piece.kind][2]
        yield self._in_part(f"{name}.delta", delta=piece.text, **extra)

    def _begin_text(self, kind: str) -> Iterator[ResponseEvent]:
        item_type = _TEXT[kind][0]
        more: dict[str, Any] = {"role": "assistant"} if kind == "content" else {"summary": []}
        item = {"id": _new(_IDS[item_type]), "type": item_type, "status": "in_progress"}
        self._open, self._text = kind, ""
        yield from self._begin_item({**item, **more, "content": []})
        yield self._in_part("response.content_part.added", part=_part(kind, ""))

    def _begin_item(self, item: dict[str, Any]) -> Iterator[ResponseEvent]:
        self._output.append(item)
        yield self._in_output("response.output_item.added", item=dict(item))

    def _close(self, status: str = "completed") -> Iterator[ResponseEvent]:
        """End the item that is open, if any, with this status."""
        if self._open is None:
            return
        kind, part = self._open, _part(self._open, self._text)
        extra: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
        yield self._in_part(f"{_TEXT[kind][2]}.done", text=self._text, **extra)
        yield self._in_part("response.content_part.done", part=part)
        yield self._end_item(status, content=[part])
        self._open = None

    def _end_item(self, status: str, **changes: Any) -> ResponseEvent:
        self._output[-1] = {**self._output[-1], **changes, "status": status}
        return self._in_output("response.output_item.done", item=self._output[-1])

    def _call(self, call: ToolCall) -> Iterator[ResponseEvent]:
        item = {"id": _new(_IDS["function_call"]), "type": "function_call", "call_id": call.id}
        item |= {"name": call.name, "arguments": "", "status": "in_progress"}
        yield from self._begin_item(item)
        name = "response.function_call_arguments"
        where = {"item_id": item["id"]}
        yield self._in_output(f"{name}.delta", delta=call.arguments, **where)
        yield self._in_output(f"{name}.done", name=call.name, arguments=call.arguments, **where)
        yield self._end_item("completed", arguments=call.arguments)

    def _in_part(self, name: str, /, **fields: Any) -> ResponseEvent:
        return self._in_output(name, item_id=self._output[-1]["id"], content_index=0, **fields)

    # `name` is positional-only, because an event can have a field `name`.
    def _in_output(self, name: str, /, **fields: Any) -> ResponseEvent:
        return self._event(name, output_index=len(self._output) - 1, **fields)

    def _event(self, name: str, /, **fields: Any) -> ResponseEvent:
        self._number += 1
        return {"type": name, "sequence_number": self._number - 1, **fields}


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _TEXT[kind][1], "text": text}
    return part | ({"annotations": [], "logprobs": []} if kind == "content" else {})


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the `usage` object of a response or a decision."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        # Thoughts count as output tokens; their number is not known here.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _new(prefix: str) -> str:
    return prefix + uuid.uuid4().hex
