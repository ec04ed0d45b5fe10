"""What a pass does, against what the machine could do."""

from __future__ import annotations

import re

import pytest

from bench import utilization
from canvasrt.checkpoints.config import ModelConfig
from tests.helpers.reference import Pair, demo

__all__ = ["demo"]


def test_a_bundle_s_share_is_printed(
    demo: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["utilization", str(demo.bundle), "--rounds", "2"])
    utilization.main()
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"1 threads, \d+ GFLOP/s in fp32", lines[0])
    share = re.search(r"\| (\d+)% \(\d+% – \d+%\) \| \d+ \|$", lines[-1])
    assert share
    assert 0 < int(share[1]) < 100


def test_work_is_what_the_network_multiplies(demo: Pair) -> None:
    """Counted by hand for the demo: a canvas of 32 behind 64 cached tokens."""
    config, _ = ModelConfig.from_checkpoint(demo.checkpoint)
    sliding = 128 * (4 + 2 + 2) * 32 + 4 * 32 * 128
    full = 128 * (4 + 1) * 64 + 4 * 64 * 128
    mlp = 3 * 128 * (192 + 2 * 32)
    weights = 3 * sliding + full + 4 * mlp + 2 * 112 * 128 + 3 * 128 * 192
    attention = 2 * (64 + 32) * 4 * (3 * 32 + 64)
    assert utilization.work(config) == 32 * (weights + attention)
