"""The longer runs, for as long as continuous integration can afford; each is a program, too."""

from __future__ import annotations

from pathlib import Path

from canvasrt.bundle import Bundle
from tests.faults import fuzz, kills, soak
from tests.helpers.serving import needs_triton

pytestmark = needs_triton


def test_random_calls(packaged: Bundle, tmp_path: Path):
    outcomes, wrong = fuzz.run(packaged.path, tmp_path, calls=300, seed=7)
    assert not wrong
    assert outcomes["good, right"] == 15
    assert min(outcomes[each] for each in ("http 200", "http 400", "grpc ok")) > 0, outcomes


def test_random_kills(packaged: Bundle, tmp_path: Path):
    outcomes, wrong = kills.run(packaged.path, tmp_path, times=6, seed=3)
    assert not wrong
    assert sum(outcomes.values()) - outcomes["right answers"] == 6


def test_nothing_grows(packaged: Bundle, tmp_path: Path):
    _, wrong = soak.run(packaged.path, tmp_path, clients=16, seconds=15)
    assert not wrong
