"""Answers in OpenAI's format: whole, or as the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from canvasrt.containers.client.triton import StreamEvent
from canvasrt.containers.openai.parse_answer import Answer, AnswerReader


@dataclass
class Usage:
    """What a request used. A prompt counts once, however many answers it gets."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    denoising_steps: int = 0
    cached: dict[int, int] = field(default_factory=dict)  # by prompt

    def add(self, final: StreamEvent, prompt: int, first_of_prompt: bool) -> None:
        """Count one answer to the request's `prompt`-th prompt."""
        if first_of_prompt:
            self.prompt_tokens += len(final.prompt_token_ids)
        # The first of several answers encodes the prompt, and the others find it.
        known = self.cached.get(prompt, final.cached_tokens)
        self.cached[prompt] = min(known, final.cached_tokens)
        self.completion_tokens += len(final.token_ids)
        self.denoising_steps += sum(final.steps)

    def to_json(self) -> dict[str, Any]:
        """Return the `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            "denoising_steps": self.denoising_steps,
        }


@dataclass
class ReplyShape:
    """Builds the objects of one request, a chat or a completion. `seed` is that of its first
    answer."""

    chat: bool
    model: str
    fingerprint: str
    seed: int
    ignored: list[str] | None = None
    with_usage: bool = False
    # Makes the reader of one answer to a chat.
    reader: Callable[[], AnswerReader] = AnswerReader
    usage: Usage = field(default_factory=Usage)
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex
        self._readers: dict[int, AnswerReader] = {}

    def whole(self, finals: list[StreamEvent]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self._choice(index, final) for index, final in enumerate(finals)]
        return {**self._head(kind), "choices": choices, "usage": self.usage.to_json()}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a choice, which a chat has for its role."""
        return self._chunk(index, {"role": "assistant", "content": ""}) if self.chat else None

    def pieces(self, index: int, event: StreamEvent) -> list[dict[str, Any]]:
        """Return the chunks for more of an answer's text; the first has its tokens' scores."""
        text = event.text
        if self.chat:
            chunks = self._read(index, text)
        else:
            chunks = [self._chunk(index, text)] if text else []
        if scores := self._scores(event.logprobs):
            chunks = chunks or [self._chunk(index, {"content": ""} if self.chat else "")]
            chunks[0]["choices"][0]["logprobs"] = scores
        return chunks

    def closing(self, index: int, final: StreamEvent) -> list[dict[str, Any]]:
        """Return the last chunks of a choice."""
        chunks = self._closing(index, final.finish_reason)
        chunks[-1]["choices"][0] |= block_scores(final)
        return chunks

    def _closing(self, index: int, finish_reason: str) -> list[dict[str, Any]]:
        if not self.chat:
            return [self._chunk(index, "", finish_reason)]
        left = self._read(index, "", final=True)
        finish = _finish(finish_reason, self._readers[index].calls)
        return [*left, self._chunk(index, {}, finish)]

    def draft(self, index: int, event: StreamEvent) -> dict[str, Any]:
        """Return a chunk with the canvas of one step. Like the one with usage, it has no choices."""
        canvas = {"index": index, "block": event.block, "step": event.step}
        chunk = {**self._chunk_head(), "choices": []}
        chunk["canvasrt"] = {**chunk["canvasrt"], "draft": canvas | json.loads(event.canvas)}
        return chunk | ({"usage": None} if self.with_usage else {})

    def usage_chunk(self) -> dict[str, Any]:
        """Return the chunk after all choices."""
        return {**self._chunk_head(), "choices": [], "usage": self.usage.to_json()}

    def _choice(self, index: int, final: StreamEvent) -> dict[str, Any]:
        answer: dict[str, Any] = {"text": final.text}
        finish = final.finish_reason
        if self.chat:
            read = Answer.read(self.reader(), final.text)
            answer = {"message": read.to_message()}
            finish = _finish(finish, len(read.calls))
        scores = self._scores(final.logprobs)
        choice = {"index": index, **answer, "logprobs": scores, "finish_reason": finish}
        return choice | block_scores(final)

    def _read(self, index: int, text: str, final: bool = False) -> list[dict[str, Any]]:
        """Take more of an answer's text apart; return its chunks."""
        reader = self._readers.setdefault(index, self.reader())
        chunks = []
        for piece in reader.put(text, final):
            if piece.call is None:
                name = "content" if piece.kind == "content" else "reasoning_content"
                chunks.append(self._chunk(index, {name: piece.text}))
                continue
            call = piece.call.to_json()
            arguments = call["function"].pop("arguments")
            head = {"index": piece.number, **call}
            head["function"]["arguments"] = ""
            rest = {"index": piece.number, "function": {"arguments": arguments}}
            chunks += [self._chunk(index, {"tool_calls": [each]}) for each in (head, rest)]
        return chunks

    def _scores(self, text: str) -> dict[str, Any] | None:
        """Return a model's scores in OpenAI's form, without the token that ends the answer."""
        if not text:
            return None
        scores = [each for each in json.loads(text) if not each["end"]]
        if self.chat:
            content = [
                {**_score(each), "top_logprobs": [_score(other) for other in each["top"]]}
                for each in scores
            ]
            return {"content": content, "refusal": None}
        ends = accumulate((len(each["text"]) for each in scores), initial=0)
        return {
            "tokens": [each["text"] for each in scores],
            "token_logprobs": [each["logprob"] for each in scores],
            "top_logprobs": [
                {other["text"]: other["logprob"] for other in each["top"]} for each in scores
            ],
            "text_offset": list(ends)[:-1],
        }

    def _chunk(self, index: int, content: Any, finish: str | None = None) -> dict[str, Any]:
        name = "delta" if self.chat else "text"
        choice = {"index": index, name: content, "logprobs": None, "finish_reason": finish}
        usage = {"usage": None} if self.with_usage else {}
        return {**self._chunk_head(), "choices": [choice], **usage}

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            # Our own addition: repeats the answer, even if the caller gave no seed.
            "canvasrt": own_fields(self.seed, self.ignored),
        }


def block_scores(final: StreamEvent) -> dict[str, Any]:
    """Return what a choice has of its blocks' scores: nothing, unless they were asked for."""
    return {"block_scores": json.loads(final.block_scores)} if final.block_scores else {}


def own_fields(seed: int, ignored: list[str] | None) -> dict[str, Any]:
    """Return what replies add to OpenAI's: the seed, and warnings about what was left out."""
    return {"seed": seed, **({"warnings": ignored} if ignored else {})}


def _finish(reason: str, calls: int) -> str:
    return "tool_calls" if calls and reason == "stop" else reason


def _score(each: dict[str, Any]) -> dict[str, Any]:
    return {
        "token": each["text"],
        "logprob": each["logprob"],
        "bytes": list(each["text"].encode()),
    }
