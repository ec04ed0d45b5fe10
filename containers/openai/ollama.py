"""Ollama's `/api/chat` and `/api/generate`, whose requests are converted to OpenAI's chats and completions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, ClassVar, NotRequired

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from canvasrt.containers.client.triton import StreamEvent
from canvasrt.containers.openai.body import OWN, Body, MaybeMessages, about, check_parts, translated
from canvasrt.containers.openai.chat import (
    CompletionRequest,
    chat_generation,
    completion_generation,
)
from canvasrt.containers.openai.chunks import token_score, visible_scores
from canvasrt.containers.openai.endpoint import Endpoint
from canvasrt.containers.openai.errors import ApiError, bad_request
from canvasrt.containers.openai.fields import OLLAMA, Table, settle
from canvasrt.containers.openai.generation import (
    Answer,
    Generation,
    Reply,
    Served,
    finish_reason,
)
from canvasrt.containers.openai.parse_answer import Piece, text_of
from canvasrt.containers.openai.tools import ChatRequest
from canvasrt.types import Json

# Supported options → fields of a chat.
_OPTIONS = {"num_predict": "max_tokens"} | {
    name: name for name in ("seed", "stop", "logit_bias", "canvas", *(each.name for each in OWN))
}


# Patterns of a chat's fields → Ollama's fields.
_NAMES = {rf"(?<![\w.]){own}\b": f"options.{name}" for name, own in _OPTIONS.items()} | {
    r"(?<![\w.])response_format(\.json_schema\.schema)?\b": "format",
    r"(?<![\w.])(reasoning_effort|enable_thinking)\b": "think",
}


class OllamaRequest(Body):
    """The fields that both operations share."""

    table: ClassVar[Table] = OLLAMA

    stream: Annotated[
        bool | None,
        AfterValidator(lambda stream: stream is not False),  # as in Ollama, null means true
        about("Stream lines of JSON as soon as text is final."),
    ] = True
    options: Annotated[dict[str, Any] | None, about("Settings of the sampler.")] = None
    think: Annotated[Any, about("Whether the model thinks before it answers, or how much.")] = None
    keep_alive: Any = None
    format: Annotated[Any, about("`json`, or the schema of the answer.")] = None
    logprobs: Annotated[bool | None, about("Also return the tokens' log-probabilities.")] = None
    top_logprobs: Annotated[int | None, about("Likeliest tokens to list per token.")] = None

    @property
    def name(self) -> str:
        """The model's name, without Ollama's tag."""
        return self.model.removesuffix(":latest")

    def check_model(self, served: Collection[str]) -> None:
        self.model = self.model or next(iter(served))
        if self.name not in served:
            message = f"model {self.model!r} not found"
            raise ApiError(404, message, param="model", code="model_not_found")


class OllamaChat(OllamaRequest):
    """The body of `/api/chat`."""

    messages: MaybeMessages = Field(default_factory=list)
    tools: list[Any] | None = None


class OllamaPrompt(OllamaRequest):
    """The body of `/api/generate`. A raw prompt is continued without chat template, thoughts and tool calls."""

    prompt: str | None = None
    system: str | None = None
    images: list[Any] | None = None
    raw: bool | None = None


class OllamaError(TypedDict):
    """An error's message."""

    error: str


class OllamaAnswer(TypedDict):
    """The last line of a streamed answer, or a whole answer."""

    model: str
    created_at: str
    done: bool
    done_reason: str
    total_duration: int
    prompt_eval_count: NotRequired[int]  # absent for an empty request, which only loads the model
    eval_count: NotRequired[int]
    logprobs: NotRequired[list[Json]]


def chat(body: OllamaChat) -> Generation:
    """Return a chat's generation. Raises ApiError for a wrong or unsupported field."""
    if not body.messages:
        return Generation({})  # an empty request, which only loads the model
    fields: Json = {"messages": _messages(body.messages)}
    if body.tools:
        fields["tools"] = body.tools
    return chat_generation(_read(ChatRequest, body, fields | _scores(body)))


def generate(body: OllamaPrompt) -> Generation:
    """Return a prompt's generation. Raises ApiError for a wrong or unsupported field."""
    prompt = body.prompt or ""
    if not (prompt or body.images):
        return Generation({})  # an empty request, which only loads the model
    if body.raw and body.images:
        raise bad_request(
            "images are not supported with raw, which takes no chat template", "images"
        )
    if body.raw:
        # A completion has one field for `logprobs` and `top_logprobs`.
        scores = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
        return completion_generation(_read(CompletionRequest, body, {"prompt": prompt, **scores}))
    system = [{"role": "system", "content": body.system}] if body.system else []
    check_parts([{"images": body.images}], "images")
    user = {"role": "user", "content": prompt, "images": body.images}
    fields = {"messages": _messages([*system, user]), **_scores(body)}
    return chat_generation(_read(ChatRequest, body, fields))


def _scores(body: OllamaRequest) -> Json:
    return {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs or None}


def _read(kind: Any, body: OllamaRequest, fields: Json) -> Any:
    """Return a request of OpenAI's type `kind` that has `fields` and the settings in `body`."""
    return translated(kind, fields | {"model": body.name, **_settings(body)}, body)


def _settings(body: OllamaRequest) -> Json:
    fields: Json = {}
    for name, value in (body.options or {}).items():
        if name in _OPTIONS:
            fields[_OPTIONS[name]] = value
        else:
            settle(f"options.{name}", value, OLLAMA, body.ignored)
            if name == "repeat_penalty" and value == 1.1 and body.ignored is not None:
                body.ignored.note(
                    "options.repeat_penalty is not applied: all tokens of a block are decided together."
                )
    for name, least in (("max_tokens", 1), ("seed", 0)):
        value = fields.get(name)
        # In Ollama, a value below `least` means no limit; for the seed, it means a random seed.
        if isinstance(value, int) and value < least:
            del fields[name]
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    elif body.think is not None and not getattr(body, "raw", False):
        fields["enable_thinking"] = body.think
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format not in (None, ""):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    return fields


def _messages(messages: list[Json]) -> list[Json]:
    """Convert messages to OpenAI's form. Ollama's tool calls may lack ids, so the result of a tool is matched to a call
    by its id, else by the tool's name, else in order."""
    read: list[Json] = []
    open_calls: list[Json] = []
    for number, message in enumerate(messages):
        one = {k: v for k, v in message.items() if k in ("role", "content") and v is not None}
        if message.get("thinking"):
            one["reasoning_content"] = message["thinking"]
        for name in ("images", "tool_calls"):
            if not isinstance(message.get(name) or [], list):
                raise bad_request(f"messages[{number}].{name} is not a list", "messages")
        if message.get("images"):
            images = [{"type": "image_url", "image_url": {"url": u}} for u in message["images"]]
            # In training data, images precede the text about them.
            one["content"] = [*images, {"type": "text", "text": message.get("content") or ""}]
        if message.get("tool_calls"):
            calls = [_call(each, f"{number}.{i}") for i, each in enumerate(message["tool_calls"])]
            one["tool_calls"], open_calls = calls, calls[:]
        if message.get("role") == "tool":
            fit = min(open_calls, key=partial(_unlike, message), default={"id": "unknown"})
            open_calls = [each for each in open_calls if each is not fit]
            one["tool_call_id"] = fit["id"]
            if message.get("tool_name"):
                one["name"] = message["tool_name"]
        read.append(one)
    return read


def _unlike(result: Json, call: Json) -> tuple[bool, bool]:
    """Return whether the id of a tool's result differs from the id of a call, and whether the names differ."""
    name = call["function"]["name"]
    return result.get("tool_call_id") != call["id"], result.get("tool_name") != name


def _call(call: Any, id: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise bad_request("a tool call has no function", "messages")
    arguments = json.dumps(function.get("arguments") or {})
    return {
        "id": call.get("id") or id,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


class GenerateReply(Reply):
    """Renders answers to prompts as lines of JSON."""

    media_type = "application/x-ndjson"

    def __init__(self, body: Any, asked: Generation, seed: int, served: Served) -> None:
        super().__init__(body, asked, seed, served)
        self._begin = time.perf_counter_ns()

    def whole(self, answers: Sequence[Answer]) -> Json:
        if not answers:
            return self._loaded()
        return self.close(0, answers[0])[0] | _told(answers[0].final.logprobs)

    def add(self, index: int, pieces: list[Piece], event: StreamEvent) -> list[Json]:
        told = _told(event.logprobs)
        return [self._line(pieces) | told] if pieces or told else []

    def close(self, index: int, answer: Answer) -> list[Json]:
        final, ignored = answer.final, self.asked.ignored
        end = {
            **({"canvasrt": {"warnings": ignored}} if ignored else {}),
            "done": True,
            "done_reason": finish_reason(final),
            **self._durations(),
            "prompt_eval_count": len(final.prompt_token_ids),
            "eval_count": len(final.token_ids),
        }
        return [self._line(answer.pieces) | end]

    def end(self) -> list[Json]:
        nothing = self.asked.messages is None and not self.asked.prompts
        return [self._loaded()] if nothing else []

    def failed(self, error: ApiError) -> list[Json]:
        return [{"error": error.message}]

    def encode(self, chunk: Json) -> bytes:
        return json.dumps(chunk).encode() + b"\n"  # in ASCII, as in `Reply.encode`

    def text(self, text: str, more: Json) -> Json:
        """Return a line's fields: `text`, and `more`, which holds the thoughts and tool calls."""
        return {"response": text, **more}

    def _loaded(self) -> Json:
        """Return the answer to an empty request, which asks Ollama to load or unload a model. Here the model stays
        loaded."""
        reason = "unload" if self.body.keep_alive == 0 else "load"
        return self._line([]) | {"done": True, "done_reason": reason} | self._durations()

    def _durations(self) -> Json:
        """Return durations in nanoseconds. The duration of the answer includes encoding the prompt."""
        taken = time.perf_counter_ns() - self._begin
        spent = {"total_duration": taken, "load_duration": 0, "eval_duration": taken}
        return {**spent, "prompt_eval_duration": 0}  # without it, ollama-rs drops all counts

    def _line(self, pieces: list[Piece]) -> Json:
        thought = text_of(pieces, "reasoning")
        calls = [
            {"function": {"name": each.call.name, "arguments": json.loads(each.call.arguments)}}
            for each in pieces
            if each.call is not None
        ]
        more = ({"thinking": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        line = {"model": self.body.model, "created_at": now, "done": False}
        return line | self.text(text_of(pieces, "content"), more)


def _told(scores: str) -> Json:
    return {"logprobs": list(map(token_score, visible_scores(scores)))} if scores else {}


class ChatLines(GenerateReply):
    """Renders answers to chats as lines of JSON."""

    def text(self, text: str, more: Json) -> Json:
        return {"message": {"role": "assistant", "content": text, **more}}


def _endpoint(path: str, about: str, body: Any, parse: Callable[..., Any], reply: Any) -> Endpoint:
    return Endpoint(path, about, body, parse, reply, OllamaAnswer, True, _NAMES, OllamaError)


CHAT = _endpoint("/api/chat", "Ollama's chats.", OllamaChat, chat, ChatLines)
GENERATE = _endpoint("/api/generate", "Ollama's prompts.", OllamaPrompt, generate, GenerateReply)
