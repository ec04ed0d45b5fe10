"""Measures a whole build of one small segment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.acceptance

pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")

ROOT = Path(__file__).parents[2]


def test_every_stage_and_segment_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "build.json"
    # In a separate process; otherwise, the measured peak would include this process's memory.
    words = ["build", "--shape", "narrow", "--layers", "2", "-o", str(out)]
    subprocess.run([sys.executable, "-m", "bench", *words], check=True, cwd=ROOT)
    data = json.loads(out.read_text())["figures"]
    (whole,) = data["builds"]
    assert (whole["weights"], whole["layers"], whole["target"]) == ("nvfp4", 2, "rtx-5090")
    rows = {row["stage"]: row for row in data["stages"]}
    segments = ["body_0 for rtx-5090", "head for rtx-5090"]
    assert list(rows) == ["checkpoint", "export", "build for rtx-5090", *segments]
    for row in rows.values():
        assert row["seconds"] > 0.1
        assert row["peak bytes"] > row["not file-backed"] > 10**7
        assert row["bytes written"] > 10**7
    # The head's engine holds the table of 134 MB, and the body's engine the experts' 4-bit weights.
    assert rows["head for rtx-5090"]["bytes written"] > 134e6
    (memory,) = data["device memory"]
    assert 0 < memory["largest_activations"] < memory["workspace"] < memory["total"]
    assert 0.1 < whole["engines, GB"] < whole["peak memory, GB"] < 3
    assert whole["export and build, s"] >= max(rows[name]["seconds"] for name in segments)


def test_a_calibrated_build_is_measured_beside_its_plan(tmp_path: Path) -> None:
    out = tmp_path / "build.json"
    words = ["--shape", "narrow", "--layers", "2", "--target", "cpu", "--precision", "nvfp4"]
    command = [sys.executable, "-m", "bench", "calibrated", *words, "--steps", "2", "-o", str(out)]
    subprocess.run(command, check=True, cwd=ROOT)
    data = json.loads(out.read_text())["figures"]
    stages = {row["stage"]: row["seconds"] for row in data["stages"]}
    assert stages.keys() >= {"hashing", "calibrating", "quantizing", "lowering"}
    (row,) = data["builds"]
    assert row["calibrating, s"] == pytest.approx(stages["calibrating"], abs=0.1)
    assert row["disk, GB"] == pytest.approx(row["disk planned"], rel=0.15)
