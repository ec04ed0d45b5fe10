"""Parses JSON from callers, within limits."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

MAX_DEPTH = 100  # maximum nesting of brackets
MAX_VALUES = 2**19  # maximum number of values in a body: enough for two contexts of 256k token ids
_PIECE = 1 << 18  # number of bytes to check at a time; numpy lets other threads run meanwhile
_STEPS = np.zeros(256, np.int8)  # for each byte, how it changes the nesting depth
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


def check_json(text: bytes, most: int = MAX_VALUES) -> int:
    """Raise ValueError for a JSON text with too many values or too deeply nested brackets, before it is parsed. Other
    errors are left to the parser.

    Return the number of values; for a small text, an upper bound that also counts commas and brackets in strings."""
    brackets = text.count(b"[") + text.count(b"{")
    values = 1 + text.count(b",") + brackets
    if values <= most and brackets <= MAX_DEPTH:
        return values
    values, depth, quoted, at = 1, 0, False, 0
    while at < len(text):
        piece = text[at : at + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # do not cut an escape sequence
            piece = text[at : at + _PIECE + 1]
        at += len(piece)
        codes = np.frombuffer(piece.replace(rb"\\", b"  ").replace(rb"\"", b"  "), np.uint8)
        inside = np.bitwise_xor.accumulate(codes == ord('"')) ^ quoted
        steps = _STEPS[codes] * ~inside
        values += int(np.count_nonzero((steps > 0) | ((codes == ord(",")) & ~inside)))
        if values > most:
            raise ValueError(f"it has more than {most} values")
        depths = np.cumsum(steps, dtype=np.int32) + depth
        if depths.max() > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        if depths.min() < 0:
            raise ValueError("it has more closing brackets than opening ones")
        depth, quoted = int(depths[-1]), inside[-1]
    return values


def load_json(text: str | bytes, most: int = MAX_VALUES) -> Any:
    """Parse a JSON text of at most `most` values. Raises ValueError with a reason for the caller."""
    check_json(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text, most)
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
        raise ValueError("it is nested too deep") from None
    except ValueError as error:  # invalid UTF-8, or a number with thousands of digits
        raise ValueError(str(error).partition(";")[0]) from None
