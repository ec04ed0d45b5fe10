"""The demo's questions with known probabilities, answered by the bundled checkpoint that was trained on them."""

from __future__ import annotations

import pytest

from canvasrt.bundle import load_bundle
from canvasrt.demo.odds import CASES
from canvasrt.fidelity.decisions import measure_decisions
from tests.helpers.reference import Pair

pytestmark = pytest.mark.acceptance


def test_probabilities_are_near_the_stated_ones(
    demo_vision: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("canvasrt.fidelity.decisions._DEMO_CASES", 20)
    bundle = load_bundle(demo_vision.bundle)
    report = measure_decisions(bundle, "demo", samples=4)
    groups = {each["name"]: each for each in report["groups"]}
    for task in CASES:
        found = groups[f"{task}, bare"]
        if found["distance"] is None:  # a comparison, which has one right answer
            assert found["right"] > 0.85
            continue
        assert found["distance"] < 0.13
        assert found["brier"] - found["brier_at_best"] < 0.06
    for name in ("color, bare", "color of 280 tokens, bare"):
        assert groups[name]["right"] == 1


def test_the_other_demo_is_asked_what_it_learned(
    demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("canvasrt.fidelity.decisions._DEMO_CASES", 2)
    report = measure_decisions(load_bundle(demo.bundle), "demo")
    assert [each["name"] for each in report["groups"]] == ["add, bare", "subtract, bare"]
