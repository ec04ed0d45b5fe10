"""What is refused before a bundle is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from canvasrt.errors import CanvasError
from canvasrt.runtime import open as opening


def test_weights_that_the_machine_cannot_hold_are_refused(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be copied until the kernel ends the process."""
    files = opening.load_bundle(tiny.bundle).manifest.files
    weights = [name for name in files if name.startswith(("body", "head")) and name.endswith("bin")]
    need = sum(files[name]["bytes"] for name in weights)
    assert need
    monkeypatch.setattr(opening, "memory_bytes", lambda: need)
    opening.open_model(tiny.bundle, threads=1)
    monkeypatch.setattr(opening, "memory_bytes", lambda: need - 1)
    with pytest.raises(CanvasError, match="and this machine has") as error:
        opening.open_model(tiny.bundle, threads=1)
    assert "--precision int4" in error.value.hint
