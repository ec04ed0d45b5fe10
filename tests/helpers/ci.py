"""Whether this is continuous integration, where tests that cannot run fail."""

from __future__ import annotations

import os


def in_ci() -> bool:
    """Whether the variable CI says so."""
    return os.environ.get("CI", "").lower() in ("1", "true")
