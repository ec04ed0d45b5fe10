"""Converts the messages of a chat to the form that the chat template expects."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from canvasrt.containers.openai.errors import ApiError, bad_request
from canvasrt.containers.openai.fields import MESSAGE, Ignored, settle
from canvasrt.containers.untrusted import MAX_DEPTH, MAX_VALUES, check_json, load_json

# OpenAI's roles → the chat template's roles.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TABLE = {f"messages.{name}": values for name, values in MESSAGE.items()}
DETAILS = ("auto", "low", "high", "original")
# Role → fields that its messages may have in addition to role, content and name.
_FIELDS = {
    "assistant": ("tool_calls", "reasoning_content", "reasoning"),
    "tool": ("tool_call_id",),
}


class Chat(NamedTuple):
    """Messages for the chat template, and their images as pairs: the file's contents, and the requested `detail`."""

    messages: list[dict[str, Any]]
    images: list[tuple[bytes, str]]


@dataclass
class _Found:
    """The state while messages are read. `images` holds the images found so far. `ignored` holds warnings about ignored
    fields; None if unknown fields are refused. `values`: how many more JSON values tool calls may contain in total."""

    images: list[tuple[bytes, str]]
    ignored: Ignored | None
    values: int = MAX_VALUES


def read_messages(messages: Sequence[dict[str, Any]], ignored: Ignored | None = None) -> Chat:
    """Convert a chat. If a field is wrong, raises an ApiError that names that field. Unsupported fields go to `settle`.

    The result contains earlier thoughts. The template drops them, except thoughts that precede tool calls in the
    current turn.
    """
    found = _Found([], ignored)
    read = [_message(each, f"messages[{i}]", found) for i, each in enumerate(messages)]
    last = max((i for i, each in enumerate(read) if each["role"] == "user"), default=-1)
    parts = [part for i, each in enumerate(read) for part in _in_order(each, i < last)]
    return Chat(parts, found.images)


def _in_order(message: dict[str, Any], is_past: bool) -> list[dict[str, Any]]:
    """Return an answer with calls as two messages: its thought and text, which the model wrote first, and its calls.
    From a single message, the released template would write the text after the calls' results, and end the model's
    turn.

    `is_past`: whether a later turn follows. If so, the template keeps only the thoughts of messages with calls.
    """
    if not (message.get("tool_calls") and message["content"].strip()):
        return [message]
    calls = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
    told = {name: each for name, each in message.items() if name != "tool_calls"}
    if is_past and "reasoning_content" in told:
        calls["reasoning_content"] = told.pop("reasoning_content")
    return [told, calls]


def _message(message: dict[str, Any], where: str, found: _Found) -> dict[str, Any]:
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
        # Empty fields are ignored, because clients send earlier answers back with all of their fields.
        if name not in allowed and value not in (None, [], ""):
            settle(f"{where}.{name}", value, _TABLE, found.ignored)
    read: dict[str, Any] = {"role": _ROLES[role]}
    calls = message.get("tool_calls") if role == "assistant" else None
    if calls:
        read["tool_calls"] = _calls(calls, f"{where}.tool_calls", found)
    if message.get("content") or role not in ("assistant", "tool"):
        parts = _content(message.get("content"), f"{where}.content", found)
        if role != "user" and not isinstance(parts, str):
            raise bad_request(
                f"{where} has an image; only a user's message may have one.",
                f"{where}.content",
                "unsupported_parameter",
            )
        read["content"] = parts
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


def _calls(calls: Any, where: str, found: _Found) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(where, "it must be a list")
    return [_call(each, f"{where}[{i}]", found) for i, each in enumerate(calls)]


def _call(call: Any, where: str, found: _Found) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise _wrong(where, "it must be a function call")
    if not isinstance(call.get("id"), str):
        raise _wrong(f"{where}.id", "it must be a string")
    name, text = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(text, str):
        raise _wrong(f"{where}.function", "its name and arguments must be strings")
    try:
        found.values -= check_json(text.encode("utf-8", "surrogatepass"), found.values)
    except ValueError:
        raise _wrong(
            f"{where}.function.arguments",
            f"the arguments of all calls may have {MAX_VALUES} values together, "
            f"and be nested {MAX_DEPTH} deep",
        ) from None
    try:
        arguments = load_json(text or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise _wrong(f"{where}.function.arguments", "it must be a JSON object, as a string")
    return {"id": call["id"], "function": {"name": name, "arguments": arguments}}


def _result(message: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message.get("tool_call_id"), str):
        raise _wrong(
            f"{where}.tool_call_id", "a tool's message must have the id of the call that it answers"
        )
    name = message.get("name")
    return {"tool_call_id": message["tool_call_id"]} | ({"name": name} if name else {})


def _content(content: Any, where: str, found: _Found) -> str | list[dict[str, Any]]:
    """Return a message's content: one string, or the template's parts if it has images."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong(where, "it must be a string or a list of parts")
    before = len(found.images)
    parts = [_part(part, f"{where}[{i}]", found) for i, part in enumerate(content)]
    if len(found.images) > before:
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: Any, where: str, found: _Found) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        _only(part, where, found, "type", "text")
        return {"type": "text", "text": part["text"]}
    if kind == "image_url" and isinstance(part.get("image_url"), dict):
        _only(part, where, found, "type", "image_url")
        found.images.append(_image(part["image_url"], f"{where}.image_url", found))
        return {"type": "image"}
    if kind in ("input_audio", "file", "video_url"):
        raise bad_request(
            f"{where} is of type {kind}, which is not supported: this server reads text and images.",
            where,
            "unsupported_parameter",
        )
    raise bad_request(f"Invalid {where}: it must be a text or image part.", where, "invalid_value")


def _image(image: dict[str, Any], where: str, found: _Found) -> tuple[bytes, str]:
    _only(image, where, found, "url", "detail")
    url, detail = image.get("url"), image.get("detail") or "auto"
    if detail not in DETAILS:
        raise bad_request(
            f"Invalid {where}.detail: it must be one of {', '.join(DETAILS)}.",
            f"{where}.detail",
            "invalid_value",
        )
    if not isinstance(url, str):
        raise _wrong(f"{where}.url", "it must be a string")
    if is_remote(url):
        raise bad_request(
            f"{where}.url is remote, and this server fetches nothing: send a data URL, "
            "or start the server with --allow-remote-images.",
            f"{where}.url",
            "unsupported_parameter",
        )
    text = url.partition(",")[2] if url.startswith("data:") else url
    try:
        return base64.b64decode(text, validate=True), detail
    except ValueError:
        raise bad_request(
            f"Invalid {where}.url: it must be a data URL in base64.",
            f"{where}.url",
            "invalid_value",
        ) from None


def has_images(messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether any of the messages has an image."""
    parts = (each.get("content") for each in messages)
    lists = (each for each in parts if isinstance(each, list))
    kinds = (part.get("type") for each in lists for part in each if isinstance(part, dict))
    return any(kind == "image_url" for kind in kinds)


def is_remote(url: str) -> bool:
    """Return whether a URL is fetched over the network."""
    return url[:8].lower().startswith(("http://", "https://"))


def _only(part: dict[str, Any], where: str, found: _Found, *names: str) -> None:
    for name, value in part.items():
        if name not in names:
            settle(f"{where}.{name}", value, _TABLE, found.ignored)


def _wrong(where: str, why: str) -> ApiError:
    return bad_request(f"Invalid {where}: {why}.", where, "invalid_type")
