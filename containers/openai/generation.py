"""The core of all APIs: a request as a `Generation`, and the loop that produces its answers.

An endpoint parses its body to a `Generation`; its `Reply` renders the answers in the API's format.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from canvasrt.containers.client.triton import StreamEvent
from canvasrt.containers.openai.body import MAX_ANSWERS
from canvasrt.containers.openai.errors import ApiError, bad_request, rename
from canvasrt.containers.openai.fields import Ignored
from canvasrt.containers.openai.messages import Chat, read_messages
from canvasrt.containers.openai.parse_answer import AnswerParser, Piece, PlainText
from canvasrt.containers.tensors import MAX_GRAMMAR
from canvasrt.runtime.pictures import BUDGETS

_MOST_SENT = 64 * 2**20  # characters of text plus bytes of images, summed over all answers
# Random seeds stay below this limit, because clients that parse numbers as doubles (JavaScript) round larger numbers.
_SEEDS = 2**53 - MAX_ANSWERS
_LOW_DETAIL, _IMAGE_TOKENS = (
    min(BUDGETS),
    max(BUDGETS),
)  # maximum soft tokens of an image: for detail `low`, and by default


class Served(NamedTuple):
    """Facts about the server, needed for replies and limits. `max_context` is in tokens; it is None if unknown."""

    max_n: int = MAX_ANSWERS
    max_context: int | None = None
    canvas: int = 0  # tokens of one block
    fingerprint: str = ""  # identifies the model's build


@dataclass
class Generation:
    """A request in the model's terms: `n` answers to a chat, or `n` answers per prompt.

    `options` holds the model's inputs that all answers share, keyed by name; `prompts` holds each prompt's own inputs.
    If `seed` is None, a random seed is drawn, because the caller expects a different answer every time.
    """

    options: dict[str, Any]
    messages: list[dict[str, Any]] | None = None  # in OpenAI's format
    prompts: Sequence[dict[str, Any]] = ()
    n: int = 1
    seed: int | None = None
    image_tokens: int | None = None
    # Name of a tool → JSON schema of its parameters. If None, tool calls are returned as text.
    tools: Mapping[str, Mapping[str, Any]] | None = None
    parallel_calls: bool = True
    plain: bool = False  # if true, the text is not parsed for thoughts and tool calls
    # Patterns of the model's inputs → the names of the body's fields that set them.
    names: dict[str, str] = field(default_factory=dict)
    # Warnings about ignored fields; None if unknown fields are refused.
    ignored: Ignored | None = None

    def parser(self) -> AnswerParser | PlainText:
        """Return a new parser for the text of one answer."""
        return PlainText() if self.plain else AnswerParser(self.tools, self.parallel_calls)


def answer_inputs(asked: Generation, served: Served | None = None) -> list[dict[str, Any]]:
    """Return the model's inputs for each answer. Every prompt has `n` answers, whose seeds are consecutive.

    Raises ApiError for invalid messages, and for inputs that exceed the server's limits.
    """
    served, n, prompts = served or Served(), asked.n, asked.prompts
    if asked.messages is not None:
        chat = read_messages(asked.messages, asked.ignored)
        prompts = [{"messages": json.dumps(chat.messages), **_images(chat, asked.image_tokens)}]
    if n > served.max_n:
        raise bad_request(f"n is {n}; this server allows {served.max_n}.", "n", "invalid_value")
    for prompt in prompts:
        count = len(prompt.get("prompt_ids", ()))
        if served.max_context is not None and count > served.max_context:
            if "tokenize" in asked.options:  # the tokens are to be decoded
                problem = f"tokens has {count} tokens; at most {served.max_context} are allowed."
                raise bad_request(problem, "tokens", "invalid_value")
            raise bad_request(
                f"The prompt ({count} tokens) plus the new tokens exceed the context of"
                f" {served.max_context}: shorten it to {served.max_context - served.canvas} tokens, for"
                f" {served.canvas} new ones.",
                "prompt",
                "context_length_exceeded",
            )
    if len(prompts) * n > MAX_ANSWERS:
        raise bad_request(f"{len(prompts)} prompts with n = {n} exceed {MAX_ANSWERS} answers.", "n")
    if (size := len(asked.options.get("grammar", ""))) > MAX_GRAMMAR:
        problem = f"grammar has {size} characters of JSON; at most {MAX_GRAMMAR} are allowed."
        error = bad_request(problem, "grammar", "invalid_value")
        rename(error, asked.names)
        raise error
    _check_size([{**asked.options, **prompt} for prompt in prompts], n)
    seed = secrets.randbelow(_SEEDS) if asked.seed is None else asked.seed
    return [{**asked.options, **prompt, "seed": seed + i} for prompt in prompts for i in range(n)]


def _images(chat: Chat, image_tokens: int | None) -> dict[str, Any]:
    """Return the model's inputs for a chat's images: the files, and each file's maximum number of soft tokens. Without
    images, return no inputs."""
    if not chat.images:
        return {}
    most = image_tokens or _IMAGE_TOKENS
    # OpenAI's detail `low` means the smallest budget; other details mean the request's budget.
    budgets = [min(most, _LOW_DETAIL) if detail == "low" else most for _, detail in chat.images]
    return {"images": [file for file, _ in chat.images], "image_tokens": budgets}


def _check_size(inputs: Sequence[dict[str, Any]], n: int) -> None:
    """Raise ApiError if the prompts' inputs, each sent `n` times, are too large in total."""
    sent = sum(map(_size, inputs))
    if n * sent > _MOST_SENT:
        raise bad_request(
            f"{n} answers to prompts, images and tools of {sent} bytes are more than this server"
            " handles at once; send less, or ask for fewer answers.",
            "n",
            "invalid_value",
        )


def _size(inputs: dict[str, Any]) -> int:
    """Return the number of characters in a request's texts plus the number of bytes in its images."""
    values = inputs.values()
    return sum(len(value) for value in values if isinstance(value, str)) + sum(
        sum(map(len, value))
        for value in values
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (str, bytes))
    )


@dataclass
class Usage:
    """Token counts of a request. A prompt counts once, even if it has several answers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    denoising_steps: int = 0
    _cached: dict[int, int] = field(default_factory=dict)  # index of a prompt → its cached tokens

    def add(self, final: StreamEvent, prompt: int, first_of_prompt: bool) -> None:
        """Count one answer. `prompt` is the index of the prompt that it answers."""
        if first_of_prompt:
            self.prompt_tokens += len(final.prompt_token_ids)
        # The first answer encodes the prompt, and the others find it in the prefix cache. So only the minimum tells how
        # many tokens were cached before this request.
        known = self._cached.get(prompt, final.cached_tokens)
        self._cached[prompt] = min(known, final.cached_tokens)
        self.completion_tokens += len(final.token_ids)
        self.denoising_steps += sum(final.steps)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return sum(self._cached.values())

    @property
    def total_tokens(self) -> int:
        """Tokens of prompts and answers."""
        return self.prompt_tokens + self.completion_tokens


class Answer(NamedTuple):
    """A finished answer: the pieces of its text, and the model's last event."""

    pieces: list[Piece]
    final: StreamEvent


class Reply(ABC):
    """Renders the answers to one request in an API's format: at once, or as the objects of a stream."""

    media_type = "text/event-stream"
    # The body's field that holds the prompt. An error that concerns no field of the body names this field.
    text_field = "messages"

    def __init__(self, body: Any, asked: Generation, seed: int, served: Served) -> None:
        """`seed` is the first answer's seed."""
        self.body, self.asked, self.seed, self.served = body, asked, seed, served
        self.usage = Usage()

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> Any:
        """Return the reply to a request that is not streamed."""

    def open(self, index: int) -> list[Any]:
        """Return the objects that begin an answer."""
        return []

    def draft(self, index: int, event: StreamEvent) -> list[Any]:
        """Return the objects that show the canvas of one denoising step."""
        return []

    def add(self, index: int, pieces: list[Piece], event: StreamEvent) -> list[Any]:
        """Return the objects that add text, thoughts and tool calls to an answer."""
        return []

    def close(self, index: int, answer: Answer) -> list[Any]:
        """Return the objects that end an answer; `answer.pieces` are the pieces not yet streamed."""
        return []

    def end(self) -> list[Any]:
        """Return the last objects of a stream, after all of its answers."""
        return []

    def failed(self, error: ApiError) -> list[Any]:
        """Return the last objects of a stream that fails after it began."""
        return [error.to_json()]

    def encode(self, chunk: Any) -> bytes:
        """Return an object of a stream as bytes. If the object has a `type`, that becomes the event's name.

        In ASCII, because some clients (httpx) also end lines at characters such as U+2028.
        """
        name = f"event: {chunk['type']}\n" if "type" in chunk else ""
        return f"{name}data: {json.dumps(chunk)}\n\n".encode()

    def own_fields(self) -> dict[str, Any]:
        """Return the fields that we add to a reply: the seed, and warnings about ignored parameters."""
        ignored = self.asked.ignored
        return {"seed": self.seed, **({"warnings": ignored} if ignored else {})}


def finish_reason(final: StreamEvent, calls: int = 0) -> str:
    """Return OpenAI's finish reason of an answer that has `calls` tool calls. OpenAI has no reason `grammar`. It is
    reported as `length`, and `own_parts` adds the true reason."""
    if final.finish_reason == "grammar":
        return "length"
    return "tool_calls" if calls and final.finish_reason == "stop" else final.finish_reason


def own_parts(final: StreamEvent) -> dict[str, Any]:
    """Return the fields that we add to an answer: block scores if requested, and a `stop_reason` if following the
    grammar took too long."""
    scores = {"block_scores": json.loads(final.block_scores)} if final.block_scores else {}
    return scores | ({"stop_reason": "grammar"} if final.finish_reason == "grammar" else {})
