"""How many messages, and parts of them, a chat may have: each takes time, however short it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo

from canvasrt.containers.openai.errors import bad_request

MAX_MESSAGES = 8192
MAX_PARTS = 8192


def check_parts(messages: Iterable[Any], name: str) -> None:
    """Raise ApiError for messages with too many parts together: of their contents, tool calls and
    images."""
    count = sum(
        len(value)
        for message in messages
        if isinstance(message, dict)
        for value in message.values()
        if isinstance(value, list)
    )
    if count > MAX_PARTS:
        raise bad_request(
            f"{name} has {count} content parts and tool calls; at most {MAX_PARTS} are allowed.",
            name,
            "invalid_value",
        )


def _checked(messages: list[dict[str, Any]], info: ValidationInfo) -> list[dict[str, Any]]:
    check_parts(messages, info.field_name or "messages")
    return messages


Messages = Annotated[
    list[dict[str, Any]],
    Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
    AfterValidator(_checked),
]
