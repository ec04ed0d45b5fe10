"""JSON that callers send."""

from __future__ import annotations

import json
from typing import Any


def load_json(text: str | bytes) -> Any:
    """Return the value in a JSON text. ValueError, with a reason to show, if it has none that can be
    read."""
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
    except ValueError as error:  # bytes that are not UTF-8, a number of thousands of digits
        raise ValueError(str(error).partition(";")[0]) from None
