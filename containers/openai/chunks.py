"""Replies to chats and completions: whole, or as the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar, NotRequired

from typing_extensions import TypedDict

from canvasrt.containers.client.triton import StreamEvent
from canvasrt.containers.openai.chat import (
    CompletionRequest,
    chat_generation,
    completion_generation,
)
from canvasrt.containers.openai.endpoint import Endpoint
from canvasrt.containers.openai.generation import (
    Answer,
    Generation,
    Reply,
    Served,
    Usage,
    finish_reason,
    own_parts,
)
from canvasrt.containers.openai.parse_answer import Piece, text_of
from canvasrt.containers.openai.tools import ChatRequest
from canvasrt.containers.openai.vllm_fields import vllm_scores
from canvasrt.types import Json


class UsageJson(TypedDict):
    """Tokens and denoising steps of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[dict[str, int]]
    denoising_steps: int


class BlockScore(TypedDict):
    """A block's score, and how often the block was redone."""

    score: float
    redone: int


class OwnFields(TypedDict):
    """Extensions of OpenAI's replies: the seed, with which the answer can be repeated, and warnings about ignored
    parameters."""

    seed: int
    warnings: NotRequired[list[str]]
    # Only set in replies of `/v1/responses`. In other APIs, this field belongs to each answer.
    block_scores: NotRequired[list[BlockScore]]


class Message(TypedDict):
    """The assistant's message."""

    role: str
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class _Choice(TypedDict):
    index: int
    finish_reason: str
    logprobs: dict[str, Any] | None
    block_scores: NotRequired[list[BlockScore]]
    stop_reason: NotRequired[str]  # "grammar": following the grammar took too long


class ChatChoice(_Choice):
    """One answer to a chat."""

    message: Message


class TextChoice(_Choice):
    """One continuation of a prompt."""

    text: str


class _Completion(TypedDict):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: UsageJson
    canvasrt: OwnFields


class ChatCompletion(_Completion):
    """The answers to a chat."""

    choices: list[ChatChoice]


class TextCompletion(_Completion):
    """The continuations of prompts."""

    choices: list[TextChoice]


class CompletionReply(Reply):
    """Renders completions in OpenAI's form."""

    kind = chunk_kind = "text_completion"
    prefix, text_field = "cmpl-", "prompt"

    def __init__(self, body: Any, asked: Generation, seed: int, served: Served) -> None:
        super().__init__(body, asked, seed, served)
        self._id = self.prefix + uuid.uuid4().hex
        self._created = int(time.time())
        self._calls: dict[int, int] = {}  # index of an answer → number of its complete tool calls
        self._ends: dict[int, int] = {}  # index of an answer → characters of its scored tokens

    def whole(self, answers: Sequence[Answer]) -> Json:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return {**self._head(self.kind), "choices": choices, "usage": usage_json(self.usage)}

    def add(self, index: int, pieces: list[Piece], event: StreamEvent) -> list[Json]:
        chunks = [chunk for piece in pieces for chunk in self._piece(index, piece)]
        if scores := self.scores(event.logprobs, index):
            chunks = chunks or self._piece(index, Piece("content"))
            chunks[0]["choices"][0]["logprobs"] = scores
        return chunks

    def close(self, index: int, answer: Answer) -> list[Json]:
        chunks = [chunk for piece in answer.pieces for chunk in self._piece(index, piece)]
        finish = finish_reason(answer.final, self._calls.get(index, 0))
        last = self._chunk(index, self.last_delta, finish)
        last["choices"][0] |= own_parts(answer.final)
        return [*chunks, last]

    def draft(self, index: int, event: StreamEvent) -> list[Json]:
        """Return a chunk that holds the canvas of one step. Its `choices` are empty, as in the usage chunk."""
        draft = {"index": index, "block": event.block, "step": event.step}
        chunk = {**self._head(self.chunk_kind), "choices": []}
        chunk["canvasrt"] = {**chunk["canvasrt"], "draft": draft | json.loads(event.canvas)}
        return [chunk | self._no_usage]

    def end(self) -> list[Any]:
        head, usage = self._head(self.chunk_kind), usage_json(self.usage)
        last = [{**head, "choices": [], "usage": usage}] if self.body.wants_usage else []
        return [*last, "[DONE]"]

    def encode(self, chunk: Any) -> bytes:
        return b"data: [DONE]\n\n" if chunk == "[DONE]" else super().encode(chunk)

    # `ChatReply` overrides the following attributes and methods, up to `scores`.
    delta_name = "text"
    last_delta: ClassVar[Any] = ""

    def content(self, pieces: Sequence[Piece]) -> Json:
        """Return the field of a choice that holds the complete answer."""
        return {"text": text_of(pieces, "content")}

    def deltas(self, piece: Piece) -> list[Any]:
        """Return the deltas that stream a piece, one per chunk."""
        return [piece.text]

    def scores(self, text: str, index: int) -> Json | None:
        """Convert the log-probabilities in `text`, which is JSON from the model, to OpenAI's form. They follow the
        log-probabilities that the answer `index` already has. If `text` is empty, return None.

        The token that ends the answer is left out. With `echo`, that token is kept, because lm-eval then drops the last
        token itself.
        """
        if not text:
            return None
        shown, prompt = visible_scores(text), ""
        if getattr(self.body, "echo", None):
            shown, prompt = json.loads(text), self.body.prompt[index // (self.body.n or 1)]
        ends = [self._ends.get(index, 0)]
        for each in shown:
            ends.append(ends[-1] + _length(each, prompt, ends[-1]))
        self._ends[index] = ends[-1]
        scores = vllm_scores(self.body, shown)
        return {
            "tokens": [each["text"] for each in scores],
            "token_logprobs": [each["logprob"] for each in scores],
            "top_logprobs": [
                # The first token of a prompt has no log-probability.
                None
                if each["logprob"] is None
                else {other["text"]: other["logprob"] for other in each["top"]}
                for each in scores
            ],
            "text_offset": ends[:-1],
        }

    def _choice(self, index: int, answer: Answer) -> Json:
        finish = finish_reason(answer.final, sum(each.call is not None for each in answer.pieces))
        scores = self.scores(answer.final.logprobs, index)
        choice = {"index": index, **self.content(answer.pieces), "logprobs": scores}
        return {**choice, "finish_reason": finish, **own_parts(answer.final)}

    def _piece(self, index: int, piece: Piece) -> list[Json]:
        if piece.call is not None:
            self._calls[index] = self._calls.get(index, 0) + 1
        return [self._chunk(index, delta) for delta in self.deltas(piece)]

    def _chunk(self, index: int, delta: Any, finish: str | None = None) -> Json:
        choice = {"index": index, self.delta_name: delta, "logprobs": None, "finish_reason": finish}
        return {**self._head(self.chunk_kind), "choices": [choice], **self._no_usage}

    @property
    def _no_usage(self) -> Json:
        return {"usage": None} if self.body.wants_usage else {}

    def _head(self, kind: str) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.body.model,
            "system_fingerprint": self.served.fingerprint,
            "canvasrt": self.own_fields(),
        }


class ChatReply(CompletionReply):
    """Renders chat completions in OpenAI's form."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix, text_field = "chatcmpl-", "messages"
    delta_name = "delta"
    last_delta: ClassVar[Any] = {}

    def open(self, index: int) -> list[Json]:
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def content(self, pieces: Sequence[Piece]) -> Json:
        text, thought = text_of(pieces, "content"), text_of(pieces, "reasoning")
        calls = [piece.call.to_json() for piece in pieces if piece.call is not None]
        message: Json = {"role": "assistant", "content": None if calls and not text else text}
        message["refusal"] = None
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def deltas(self, piece: Piece) -> list[Any]:
        if piece.call is None:
            return [{"content" if piece.kind == "content" else "reasoning_content": piece.text}]
        head = {"index": piece.index, **piece.call.to_json()}
        head["function"] = {**head["function"], "arguments": ""}
        rest = {"index": piece.index, "function": {"arguments": piece.call.arguments}}
        return [{"tool_calls": [head]}, {"tool_calls": [rest]}]

    def scores(self, text: str, index: int) -> Json | None:
        if not text:
            return None
        scores = vllm_scores(self.body, visible_scores(text))
        return {"content": list(map(token_score, scores)), "refusal": None}


def usage_json(usage: Usage) -> UsageJson:
    """Return the `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "denoising_steps": usage.denoising_steps,
    }


def visible_scores(text: str) -> list[Json]:
    """Return the log-probabilities in the model's JSON, without the token that ends the answer."""
    return [each for each in json.loads(text) if not each["end"]]


def _length(score: Json, prompt: str | Sequence[int], begin: int) -> int:
    """Return how many characters a token adds to the answer's text at `begin`. A special token adds none, unless an
    echoed prompt spells it; a part of a character adds one if the character begins in it."""
    if score.get("hidden"):
        typed = isinstance(prompt, str) and prompt.startswith(score["text"], begin)
        return len(score["text"]) if typed else 0
    if "bytes" in score:
        return sum(byte & 0xC0 != 0x80 for byte in score["bytes"])
    return len(score["text"])


def token_score(each: Json) -> Json:
    """Return a token's log-probability in the form that chats use."""
    return {**_score(each), "top_logprobs": [_score(other) for other in each["top"]]}


def _score(each: Json) -> Json:
    return {
        "token": each["text"],
        "logprob": each["logprob"],
        "bytes": each.get("bytes", list(each["text"].encode())),
    }


CHAT = Endpoint(
    "/v1/chat/completions",
    "Answer a chat.",
    ChatRequest,
    chat_generation,
    ChatReply,
    ChatCompletion,
    streams=True,
)
COMPLETIONS = Endpoint(
    "/v1/completions",
    "Continue a prompt.",
    CompletionRequest,
    completion_generation,
    CompletionReply,
    TextCompletion,
    streams=True,
)
