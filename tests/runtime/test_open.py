"""Errors before a bundle is loaded, and how segments are loaded."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from canvasrt.errors import CanvasError
from canvasrt.runtime import open as opening
from canvasrt.runtime.backends.onnxruntime import OrtBackend, OrtSegment


def test_weights_that_the_machine_cannot_hold_are_refused(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the kernel would kill the process while it copies weights."""
    files = opening.load_bundle(tiny.bundle).manifest.files
    weights = [name for name in files if name.startswith(("body", "head")) and name.endswith("bin")]
    need = sum(files[name]["bytes"] for name in weights)
    assert need
    monkeypatch.setattr(opening, "memory_bytes", lambda: need)
    opening.open_model(tiny.bundle, threads=1)
    monkeypatch.setattr(opening, "memory_bytes", lambda: need - 1)
    with pytest.raises(CanvasError, match="this machine has") as error:
        opening.open_model(tiny.bundle, threads=1)
    assert "--precision int4" in error.value.hint


def test_segments_load_side_by_side(tiny: Any) -> None:
    """Packing a segment's weights uses one thread and takes most of the loading time."""
    both = Barrier(2)

    class Meeting(OrtBackend):
        def open(self, name: str, file: Path) -> OrtSegment:
            if name in ("body_0", "head"):
                both.wait(timeout=60)
            return super().open(name, file)

    opening.open_model(tiny.bundle, backend=Meeting(threads=2))
