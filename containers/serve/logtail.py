"""Finds the cause of a failure at the end of a log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_TAIL = 2**20  # bytes at a log's end
_CAUSES = (
    # The traceback follows on the same line, with escaped line breaks.
    re.compile(r"Failed to initialize Python stub: (?:CanvasError: )?(.*?)(?:\\n|\"?$)"),
    re.compile(r"^error: (.*)"),
    re.compile(r"^E\d{4} [^\"]*\"(.*)\""),
    re.compile(r"(.*(?:error while loading shared libraries|GLIBC_[\d.]+' not found).*)"),
)


def last_lines(log: Path) -> list[str]:
    """Return the lines at the end of a log; none if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def cause_in(lines: Sequence[str]) -> str:
    """Return the likely cause from the log: a model's exception, else an error of Triton."""
    for pattern in _CAUSES:
        for line in reversed(lines):
            match = pattern.search(line)
            if match:
                return match[1].strip()[:500]
    return ""
