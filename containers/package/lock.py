"""The SHA-256 of every wheel that packages install, by platform. `.ci/lock-images` updates this table from the
package index."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from canvasrt.containers.package.requirements import Pin

FILE = Path(__file__).parent / "lock.json"


class Locked(NamedTuple):
    """A wheel of the package index."""

    file: str
    sha256: str


def locked(pin: Pin, python: str, architecture: str) -> Locked | None:
    """Return a distribution's wheel for a platform; None if the table lacks it."""
    found = _table().get(f"cp{python}-{architecture}", {}).get(str(pin))
    return Locked(*found) if found else None


@cache
def _table() -> dict[str, dict[str, list[str]]]:
    return json.loads(FILE.read_text(encoding="utf-8"))
