"""The measurement of a whole build, on one narrow segment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")
SCRIPT = Path(__file__).parents[2] / "bench" / "build_full.py"


def test_every_stage_and_segment_is_measured(tmp_path: Path) -> None:
    arguments = ["--shape", "narrow", "--layers", "2", "-o", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "build.json").read_text())
    assert report["options"] == {
        "shape": "narrow",
        "format": "nvfp4",
        "target": "rtx-5090",
        "layers": 2,
    }
    stages = {row["name"]: row for row in report["stages"]}
    segments = {row["name"]: row for row in report["segments"]}
    assert list(stages) == ["checkpoint", "export", "build for rtx-5090"]
    assert list(segments) == ["body_0 for rtx-5090", "head for rtx-5090"]
    for row in (*stages.values(), *segments.values()):
        assert row["seconds"] > 0.1
        assert row["peak"]["resident"] > row["peak"]["own"] > 10**7
        assert row["bytes"] > 10**7
    # The 134 MB table is in the head's engine, the experts' 4-bit weights in the body's.
    assert segments["head for rtx-5090"]["bytes"] > 134e6
    memory = report["memory"]["rtx-5090"]
    assert 0 < memory["largest_activations"] < memory["workspace"] < memory["total"]
    assert report["peak"] < 3e9
    assert report["seconds"] >= max(row["seconds"] for row in segments.values())
    assert "| body_0 for rtx-5090 |" in (tmp_path / "out" / "build.md").read_text()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["build.json", "build.md"]
