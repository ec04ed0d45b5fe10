"""The measurement of a pass's rate relative to the machine's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import cpu
from bench.__main__ import main
from canvasrt.checkpoints.description import describe
from tests.helpers.reference import Pair

pytestmark = pytest.mark.acceptance


def test_a_bundle_s_share_is_printed(
    demo: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cpu.json"
    assert main(["cpu", str(demo.bundle), "--rounds", "2", "-o", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["machine"]["cores"] > 0
    assert data["machine"]["versions"]["onnxruntime"]
    (row,) = data["figures"]["passes"]
    assert 0 < row["lowest"] <= row["of the matrix rate"] <= row["highest"]
    assert f"| {demo.bundle.name} | " in capsys.readouterr().out


def test_work_is_what_the_network_multiplies(demo: Pair) -> None:
    """The expected number was counted by hand: the demo with a canvas of 32 after 64 cached tokens."""
    config = describe(demo.checkpoint).model
    sliding = 128 * (4 + 2 + 2) * 32 + 4 * 32 * 128
    full = 128 * (4 + 1) * 64 + 4 * 64 * 128
    mlp = 3 * 128 * (192 + 2 * 32)
    weights = 3 * sliding + full + 4 * mlp + 2 * 112 * 128 + 3 * 128 * 192
    attention = 2 * (64 + 32) * 4 * (3 * 32 + 64)
    assert cpu.work(config) == 32 * (weights + attention)
