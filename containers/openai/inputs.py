"""Turns a request's parameters into inputs of the served models: one Triton request per answer."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from canvasrt.containers.openai.errors import bad_request
from canvasrt.containers.openai.messages import read_messages
from canvasrt.containers.openai.schema import (
    MAX_ANSWERS,
    OWN,
    ChatRequest,
    CompletionRequest,
    Sampling,
)
from canvasrt.containers.openai.tools import template_inputs

# JSON readers that parse numbers as doubles, as JavaScript does, keep these exact.
_SEEDS = 2**53 - MAX_ANSWERS


def inputs_of(request: ChatRequest | CompletionRequest) -> list[dict[str, Any]]:
    """Return the inputs of each Triton request: `n` per prompt, with consecutive seeds.

    Without a seed, callers expect a different answer each time, so one is drawn.
    """
    if isinstance(request, ChatRequest):
        messages = json.dumps(read_messages(request.messages))
        prompts: list[dict[str, Any]] = [{"messages": messages, **template_inputs(request)}]
    else:
        prompts = [_prompt(each) for each in request.prompt]
    n = request.n or 1
    if len(prompts) * n > MAX_ANSWERS:
        raise bad_request(f"{len(prompts)} prompts with n = {n} exceed {MAX_ANSWERS} answers.", "n")
    options = _options(request)
    seed = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
    return [{**prompt, **options, "seed": seed + i} for prompt in prompts for i in range(n)]


def _options(request: Sampling) -> dict[str, Any]:
    given: dict[str, Any] = {each.name: getattr(request, each.name) for each in OWN}
    given["stop"] = request.stop
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
