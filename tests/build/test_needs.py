"""What a build takes on this machine, against measured builds (`python -m bench calibrated`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.synthetic import config_of
from canvasrt.build import needs as host
from canvasrt.build.options import BuildOptions
from canvasrt.build.plan import Plan, plan
from canvasrt.build.source import Source
from canvasrt.checkpoints.config import read_config


def planned(shape: str, layers: int | None, target: str, precision: str) -> Plan:
    model, _ = read_config(config_of(shape, layers), None)
    source = Source(Path(shape), model, {"kind": "checkpoint"})
    return plan(source, target, "out", BuildOptions(precision))


@pytest.mark.parametrize(
    ("shape", "layers", "memory", "disk"),
    [("released", 3, 2.54e9, 3.50e9), ("300m", 9, 1.22e9, 0.395e9), ("narrow", 6, 1.45e9, 0.195e9)],
)
def test_a_build_without_calibration(shape: str, layers: int, memory: int, disk: int) -> None:
    made = planned(shape, layers, "cpu", "int4")
    assert made.needs.memory == pytest.approx(memory, rel=0.1)
    assert made.disk == pytest.approx(disk, rel=0.1)


def test_a_build_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 22 GB of free memory, builders run one by one; with 60 GB, both at once."""
    monkeypatch.setattr(host, "available_bytes", lambda: 22 * 10**9)
    made = planned("released", 3, "rtx-5090", "fp8")
    assert made.needs.memory == pytest.approx(8.53e9, rel=0.1)
    assert made.disk == pytest.approx(8.74e9, rel=0.1)
    alone = made.needs.memory
    monkeypatch.setattr(host, "available_bytes", lambda: 60 * 10**9)
    assert made.needs.memory - alone == min(made.needs.segments.values())
