"""Turns a request's parameters into inputs of the served models: one Triton request per answer."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from canvasrt.containers.openai.errors import bad_request
from canvasrt.containers.openai.messages import Chat, read_messages
from canvasrt.containers.openai.response_formats import grammar_of
from canvasrt.containers.openai.schema import (
    MAX_ANSWERS,
    OWN,
    ChatRequest,
    CompletionRequest,
    Sampling,
)
from canvasrt.containers.openai.tools import template_inputs
from canvasrt.runtime.pictures import BUDGETS

_MOST_SENT = 64 * 2**20  # characters and bytes of all inputs of all answers
# JSON readers that parse numbers as doubles, as JavaScript does, keep these exact.
_SEEDS = 2**53 - MAX_ANSWERS
# Soft tokens of an image.
_LOW_DETAIL, _IMAGE_TOKENS = min(BUDGETS), max(BUDGETS)


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask for. `max_context` is in tokens; None if it is not known."""

    max_n: int = MAX_ANSWERS
    max_context: int | None = None


def triton_inputs(
    request: ChatRequest | CompletionRequest, limits: RequestLimits | None = None
) -> list[dict[str, Any]]:
    """Return the inputs of each Triton request: `n` per prompt, with consecutive seeds.

    Without a seed, callers expect a different answer each time, so one is drawn.
    """
    if isinstance(request, ChatRequest):
        prompts: list[dict[str, Any]] = [_chat(request)]
    else:
        prompts = [_prompt(each) for each in request.prompt]
    limits = limits or RequestLimits()
    n = request.n or 1
    if n > limits.max_n:
        raise bad_request(f"n is {n}; this server allows {limits.max_n}.", "n", "invalid_value")
    _check_context(prompts, limits.max_context)
    if len(prompts) * n > MAX_ANSWERS:
        raise bad_request(f"{len(prompts)} prompts with n = {n} exceed {MAX_ANSWERS} answers.", "n")
    options = _options(request)
    _check_size([{**options, **prompt} for prompt in prompts], n)
    seed = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
    return [{**options, **prompt, "seed": seed + i} for prompt in prompts for i in range(n)]


def _chat(request: ChatRequest) -> dict[str, Any]:
    chat = read_messages(request.messages, request.ignored)
    return {
        "messages": json.dumps(chat.messages),
        **template_inputs(request),
        **image_inputs(chat, request.image_tokens),
    }


def image_inputs(chat: Chat, image_tokens: int | None) -> dict[str, Any]:
    """Return a chat's images, and the most soft tokens of each; nothing for a chat without any."""
    if not chat.images:
        return {}
    most = image_tokens or _IMAGE_TOKENS
    # OpenAI's low detail is the smallest budget; a higher one than the request's is not to be had.
    budgets = [min(most, _LOW_DETAIL) if detail == "low" else most for _, detail in chat.images]
    return {"images": [file for file, _ in chat.images], "image_tokens": budgets}


def _check_context(prompts: Sequence[dict[str, Any]], max_context: int | None) -> None:
    """Raise ApiError for prompts that cannot fit, before anything is made of them."""
    for prompt in prompts:
        count = len(prompt.get("prompt_ids", ()))
        if max_context is not None and count > max_context:
            raise bad_request(
                f"The prompt ({count} tokens) plus the new tokens exceed the context of"
                f" {max_context}.",
                "prompt",
                "context_length_exceeded",
            )


def _check_size(inputs: Sequence[dict[str, Any]], n: int) -> None:
    """Raise ApiError for inputs that are too long to be sent to the model `n` times."""
    sent = sum(map(_size, inputs))
    if n * sent > _MOST_SENT:
        raise bad_request(
            f"{n} answers to prompts, images and tools of {sent} bytes are more than this server"
            " handles at once; send less, or ask for fewer answers.",
            "n",
            "invalid_value",
        )


def _size(inputs: dict[str, Any]) -> int:
    """Return the characters of a request's texts, and the bytes of its images."""
    values = inputs.values()
    return sum(len(value) for value in values if isinstance(value, str)) + sum(
        sum(map(len, value))
        for value in values
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (str, bytes))
    )


def _options(request: Sampling) -> dict[str, Any]:
    given: dict[str, Any] = {each.name: getattr(request, each.name) for each in OWN}
    if isinstance(request, CompletionRequest) and request.logprobs is not None:
        # Completions have one number for both.
        given |= {"logprobs": True, "top_logprobs": request.logprobs}
    # A call that must come has a grammar of its own.
    given["grammar"] = grammar_of(request.response_format)
    given["stop"] = request.stop
    given["logit_bias"] = json.dumps(request.logit_bias) if request.logit_bias else None
    given["canvas"] = None if request.canvas is None else json.dumps(request.canvas)
    given["drafts"] = request.wants_drafts or None
    given["max_new_tokens"] = request.token_budget[1]
    return {name: value for name, value in given.items() if value is not None and value != []}


def _prompt(prompt: str | Sequence[int]) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt, "raw": True}
    if any(not -(2**31) <= token < 2**31 for token in prompt):
        raise bad_request(
            "prompt contains a number that is not a token id.", "prompt", "invalid_value"
        )
    return {"prompt_ids": list(prompt)}
