"""A chat's messages as callers send them, turned into those of the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from canvasrt.containers.openai.errors import ApiError, bad_request

# OpenAI's roles → those of the chat template.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# What a message of each role may hold besides its role, content and name.
_FIELDS = {
    "assistant": ("tool_calls", "reasoning_content", "reasoning"),
    "tool": ("tool_call_id",),
}


def read_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the template's messages. ApiError names what is wrong or not supported.

    Earlier thoughts go along: the template keeps those that led to the tool calls it answers now,
    and drops the others.
    """
    return [_message(each, f"messages[{i}]") for i, each in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        roles = ", ".join(_ROLES)
        raise bad_request(
            f"Invalid {where}.role: {role!r} is not supported; the roles are {roles}.",
            f"{where}.role",
            "invalid_value",
        )
    allowed = ("role", "content", *_FIELDS.get(role, ()), *(("name",) if role == "tool" else ()))
    for name, value in message.items():
        # Clients send earlier answers back with their empty fields.
        if name not in allowed and value not in (None, [], ""):
            raise _unsupported(f"{where}.{name}")
    read: dict[str, Any] = {"role": _ROLES[role]}
    calls = message.get("tool_calls") if role == "assistant" else None
    if calls:
        read["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    if not calls or message.get("content"):
        read["content"] = _content(message.get("content"), f"{where}.content")
    else:
        read["content"] = ""
    if role == "tool":
        read |= _result(message, where)
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought and role == "assistant":
        if not isinstance(thought, str):
            raise _wrong(f"{where}.reasoning_content", "it must be a string")
        read["reasoning_content"] = thought
    return read


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(where, "it must be a list")
    return [_call(each, f"{where}[{i}]") for i, each in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise _wrong(where, "it must be a function call")
    if not isinstance(call.get("id"), str):
        raise _wrong(f"{where}.id", "it must be a string")
    name, text = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(text, str):
        raise _wrong(f"{where}.function", "its name and arguments must be strings")
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise _wrong(f"{where}.function.arguments", "it must be a JSON object, as a string")
    return {"id": call["id"], "function": {"name": name, "arguments": arguments}}


def _result(message: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message.get("tool_call_id"), str):
        raise _wrong(f"{where}.tool_call_id", "a tool's message names the call that it answers")
    name = message.get("name")
    return {"tool_call_id": message["tool_call_id"]} | ({"name": name} if name else {})


def _content(content: Any, where: str) -> str:
    """Return the text of a message, with its parts joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong(where, "it must be a string or a list of text parts")
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        extra = [name for name in part if name not in ("type", "text")]
        if extra:
            raise _unsupported(f"{where}.{extra[0]}")
        return str(part["text"])
    if kind in ("image_url", "input_audio", "file", "video_url"):
        raise bad_request(
            f"{where} is of type {kind}, which is not supported: this server reads text only.",
            where,
            "unsupported_parameter",
        )
    raise bad_request(f"Invalid {where}: it must be a text part.", where, "invalid_value")


def _wrong(where: str, why: str) -> ApiError:
    return bad_request(f"Invalid {where}: {why}.", where, "invalid_type")


def _unsupported(where: str) -> ApiError:
    return bad_request(f"{where} is not supported.", where, "unsupported_parameter")
