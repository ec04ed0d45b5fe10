"""Saved sweeps of a calibration: what the next start uses, and what a full disk leaves."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from canvasrt.errors import CanvasError
from canvasrt.export.quantize import calibrate, saved_sweeps


@pytest.mark.parametrize("change", ["none", "lost", "emptied", "device"])
def test_a_state_counts_only_with_all_its_files_and_on_its_device(
    change: str, tmp_path: Path
) -> None:
    saved = saved_sweeps.SavedSweeps(tmp_path, "cpu")
    saved.save(1, {"outputs": []}, {0: torch.ones(2)}, {0})
    (row,) = tmp_path.glob("row-*")
    if change == "lost":
        row.unlink()
    elif change == "emptied":
        row.write_bytes(b"")
    again = saved_sweeps.SavedSweeps(tmp_path, "cuda" if change == "device" else "cpu")
    assert bool(again.state) == (change == "none")


def test_what_is_saved_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that is not synced to the disk may have the right size and wrong content after a power cut."""
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))
    saved_sweeps.SavedSweeps(tmp_path, "cpu").save(1, {}, {0: torch.ones(2)}, {0})
    assert {file.stat().st_ino for file in tmp_path.iterdir()} == synced


def test_a_full_disk_keeps_what_was_saved(tmp_path: Path) -> None:
    """A limit on file sizes replaces a full disk: the same write fails with the same kind of error."""
    saved = saved_sweeps.SavedSweeps(tmp_path, "cpu")
    saved.save(1, {"outputs": []}, {0: torch.ones(2)}, {0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CanvasError, match="no space left"):
            saved.save(2, {"outputs": []}, {0: torch.ones(1 << 19)}, {0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = saved_sweeps.SavedSweeps(tmp_path, "cpu")
    assert again.caches(0).tolist() == [1, 1]


@pytest.mark.parametrize("state", [b"damaged", [1], {"files": [1]}, {"files": {0: 1}}])
def test_a_damaged_state_is_removed(tmp_path: Path, state: Any) -> None:
    if isinstance(state, bytes):
        (tmp_path / "state.pt").write_bytes(state)
    else:
        torch.save(state, tmp_path / "state.pt")
    (tmp_path / "row-0-1.pt").touch()
    assert not saved_sweeps.SavedSweeps(tmp_path, "cpu").state
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("text", ["", "[]", '{"routed": 1}', '{"routed": {}, "none": 1}'])
def test_a_damaged_result_is_found_again(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, nothing = calibrate.Calibration({"a": 1.0}), (None, None, None)
    (tmp_path / "calibrated.json").write_text(text)
    (tmp_path / "sweeps").mkdir()
    monkeypatch.setattr(calibrate, "_observe", lambda *_: found)
    for _ in range(2):  # the second call reads the result
        assert calibrate.calibrate(*nothing, tmp_path) == found  # type: ignore[arg-type]
