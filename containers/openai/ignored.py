"""Fields that are left out of a request, with a warning, and those that are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from canvasrt.containers.openai.errors import bad_request
from canvasrt.containers.openai.fields import REASONS, Table, passes

MAX_WARNINGS = 16  # per request


class Ignored(list[str]):
    """Warnings about ignored fields of a request. `lenient` also ignores fields that would change the answer."""

    def __init__(self, lenient: bool = False) -> None:
        super().__init__()
        self.lenient = lenient

    def note(self, message: str) -> None:
        """Add a warning, up to MAX_WARNINGS different ones."""
        if len(self) < MAX_WARNINGS and message not in self:
            self.append(message)


def settle(path: str, value: Any, table: Table, ignored: Ignored | None) -> None:
    """Ignore a field that is not supported; add a warning unless its value changes nothing.

    Raises ApiError for a value that would change the answer, unless `ignored` is lenient, and for an unknown field if
    `ignored` is None.
    """
    name = re.sub(r"\[\d+\]", "", path)
    if name not in table:
        error = bad_request(f"Unknown parameter: {path!r}.", path, "unknown_parameter")
        if ignored is None:
            raise error
    elif passes(allowed := table[name], value):
        return
    else:
        why = f": {REASONS[name]}" if name in REASONS else ""
        values = " or ".join(json.dumps(each) for each in allowed or ())
        way_out = f"Leave it out{f', or send {values}' if values else ''}."
        message = f"{path} is not supported{why}. {way_out}"
        error = bad_request(message, path, "unsupported_parameter")
        if ignored is None or not ignored.lenient:
            raise error
    ignored.note(error.message)


def known(
    given: Mapping[str, Any],
    names: Collection[str],
    path: str,
    table: Table,
    ignored: Ignored | None,
) -> dict[str, Any]:
    """Return the members of an object with these names; `settle` all others."""
    for name, value in given.items():
        if name not in names:
            settle(f"{path}.{name}", value, table, ignored)
    return {name: value for name, value in given.items() if name in names}
