"""Replies without what another run would not repeat."""

from __future__ import annotations

import re
from typing import Any

# Times, and prompt tokens from a cache, depend on when a request ran. They are 0 in a batch's output.
_WHEN = ("created", "created_at", "completed_at", "cached_tokens")
_RANDOM_ID = re.compile(r"((?:chatcmpl|cmpl|resp|msg|rs|fc|call)[-_])[\w-]{16,}")


def steady(reply: Any, key: str) -> Any:
    """Return a reply whose random ids follow from `key`, and whose times and cache counts are 0."""
    known: dict[str, str] = {}

    def walk(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {
                # Whatever a caller names itself stays.
                each: inner if each == "metadata" else walk(inner, each)
                for each, inner in value.items()
            }
        if isinstance(value, list):
            return [walk(each) for each in value]
        if name in _WHEN and isinstance(value, int | float):
            return 0
        is_id = isinstance(value, str) and (name == "id" or name.endswith("_id"))
        if is_id and (found := _RANDOM_ID.fullmatch(value)):
            return known.setdefault(value, f"{found[1]}{key}{len(known) or ''}")
        return value

    return walk(reply)
