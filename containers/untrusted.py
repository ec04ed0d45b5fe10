"""Limits and parses JSON from callers."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 100  # maximum nesting of brackets
MAX_VALUES = 2**19  # maximum values of a body: two contexts of 256k token ids
# Also matches an unterminated string, because retrying at every quote would take quadratic time.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_json(text: bytes, most: int = MAX_VALUES) -> int:
    """Raise ValueError for a JSON text with too many values or too deeply nested brackets, before it is parsed. Other
    errors are left to the parser.

    Return the number of values, which is an upper bound if strings contain commas and brackets."""
    # An upper bound, because strings may contain commas.
    values = text.count(b",") + text.count(b"[") + text.count(b"{")
    depth = text.count(b"[") + text.count(b"{")
    if values < most and depth <= MAX_DEPTH:
        return values + 1
    text = _STRING.sub(b"", text)
    values = 1 + text.count(b",") + text.count(b"[") + text.count(b"{")
    if values > most:
        raise ValueError(f"it has {values} values; at most {most} are allowed")
    left = text.translate(None, _BRACKETS)
    if len(left) > 2 * values:  # otherwise closing brackets would be searched a hundred times
        raise ValueError("it has more closing brackets than opening ones")
    for _ in range(MAX_DEPTH):
        left = left.replace(b"[]", b"").replace(b"{}", b"")
        if not left:
            return values
    raise ValueError(
        f"it has too many brackets inside each other (at most {MAX_DEPTH}), or open ones"
    )


def load_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises ValueError with a reason for the caller."""
    check_json(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    try:
        value = json.loads(text)
        if (b"\\ud" if isinstance(text, bytes) else "\\ud") in text.lower():  # type: ignore[operator]
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("it has too many brackets inside each other") from None
    except ValueError as error:  # invalid UTF-8, or a number with thousands of digits
        raise ValueError(str(error).partition(";")[0]) from None
