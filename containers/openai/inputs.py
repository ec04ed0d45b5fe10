"""Turns a request's parameters into inputs of the served models: one Triton request per answer."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from canvasrt.containers.openai.errors import bad_request
from canvasrt.containers.openai.schema import (
    MAX_ANSWERS,
    OWN,
    ChatRequest,
    CompletionRequest,
    Sampling,
)

# OpenAI's roles → those of the chat template.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# JSON readers that parse numbers as doubles, as JavaScript does, keep these exact.
_SEEDS = 2**53 - MAX_ANSWERS


def inputs_of(request: ChatRequest | CompletionRequest) -> list[dict[str, Any]]:
    """Return the inputs of each Triton request: `n` per prompt, with consecutive seeds.

    Without a seed, callers expect a different answer each time, so one is drawn.
    """
    if isinstance(request, ChatRequest):
        messages = [_message(each, f"messages[{i}]") for i, each in enumerate(request.messages)]
        prompts: list[dict[str, Any]] = [{"messages": json.dumps(messages)}]
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


def _message(message: dict[str, Any], where: str) -> dict[str, str]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        roles = ", ".join(_ROLES)
        raise bad_request(
            f"Invalid {where}.role: {role!r} is not supported; the roles are {roles}.",
            f"{where}.role",
            "invalid_value",
        )
    for name, value in message.items():
        # Clients send earlier answers back with their empty fields.
        if name not in ("role", "content") and value not in (None, [], ""):
            raise bad_request(
                f"{where}.{name} is not supported.", f"{where}.{name}", "unsupported_parameter"
            )
    return {"role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    """Return the text of a message, with its parts joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise bad_request(
            f"Invalid {where}: it must be a string or a list of text parts.", where, "invalid_type"
        )
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        extra = [name for name in part if name not in ("type", "text")]
        if extra:
            raise bad_request(
                f"{where}.{extra[0]} is not supported.",
                f"{where}.{extra[0]}",
                "unsupported_parameter",
            )
        return str(part["text"])
    if kind in ("image_url", "input_audio", "file", "video_url"):
        raise bad_request(
            f"{where} is of type {kind}, which is not supported: this server reads text only.",
            where,
            "unsupported_parameter",
        )
    raise bad_request(f"Invalid {where}: it must be a text part.", where, "invalid_value")
