"""Makes replies reproducible: replaces ids, times and cache counts."""

from __future__ import annotations

import re
from typing import Any

# Times and cached tokens depend on when a request ran. In a batch's output they are 0.
_WHEN = ("created", "created_at", "completed_at", "cached_tokens")
_RANDOM_ID = re.compile(r"((?:chatcmpl|cmpl|resp|msg|rs|fc|call)[-_])[\w-]{16,}")


def steady(reply: Any, key: str) -> Any:
    """Return the reply, but replace random ids with ids derived from `key`, and times and cache counts with 0."""
    known: dict[str, str] = {}

    def walk(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {
                # Callers choose the names in `metadata`, so an `id` there is not ours.
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
