"""Detects continuous integration, where tests that cannot run must fail."""

from __future__ import annotations

import os


def in_ci() -> bool:
    """Return whether the variable CI is set."""
    return os.environ.get("CI", "").lower() in ("1", "true")
