"""`canvasrt verify --decisions` with labelled questions of a user."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from canvasrt.calibration_prompts import _most_sweeps
from tests.canvasrt.cli.conftest import Ask, fails
from tests.conftest import Command
from tests.helpers.reference import Pair


def item(left: int, right: int, answer: str) -> dict[str, Any]:
    question = {
        "type": "choice",
        "instructions": "?",
        "choices": [{"value": str(left + right + off)} for off in (0, 1, 10)],
        "answer": answer,
    }
    group = "large" if left > 49 else "small"
    return {"input": f"{left}+{right}=", "layout": "bare", "group": group, "questions": [question]}


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """A file of twelve sums, one of them with a wrong label."""
    items = [item(n, 90 - n, "90") for n in range(20, 80, 5)]
    items[0] = item(20, 71, "92")
    file = tmp_path / "labelled.jsonl"
    file.write_text("\n".join(map(json.dumps, items)) + "\n")
    return file


def test_probabilities_are_measured(demo: Pair, labelled: Path, tmp_path: Path, ask: Ask) -> None:
    call = ("verify", demo.bundle, "--decisions", labelled, "--samples", "2")
    report = tmp_path / "report"
    found = json.loads(ask(*call, "--json", "--fit", "--report", report))["decisions"]
    assert found["all"]["questions"] == 12
    assert found["all"]["right"] == pytest.approx(11 / 12)
    # The model is confident of the right answer, which the wrong label marks as an error.
    assert found["all"]["ece"] == pytest.approx(1 / 12, abs=0.02)
    assert found["all"]["brier"] == pytest.approx(2 / 12, abs=0.03)
    assert [each["name"] for each in found["groups"]] == ["small", "large"]
    assert found["fit"]["temperatures"]["choice"] > 1
    page = (report / "report.html").read_text()
    assert all(each in page for each in ("Reliability", "<svg", "Fitted temperatures"))
    assert json.loads((report / "report.json").read_text()) == found
    assert "calibrated probabilities may show by chance" in " ".join(ask(*call).split())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no labelled questions"),
        ("{", "cannot read"),
        ('{"input": "x", "question": []}', "[0].question is unknown"),
        ('{"input": "x"}', "[0]: questions is not a list"),
        ('{"input": "x", "questions": [{"type": "essay"}]}', "questions[0].type is 'essay'"),
        (
            '{"input": "x", "questions": [{"type": "predicate", "instructions": "?"}]}',
            "questions[0].answer is None",
        ),
        ('{"input": "x", "questions": [], "images": ["none.png"]}', "[0].images"),
    ],
)
def test_wrong_files(demo: Pair, tmp_path: Path, here: Command, content: str, message: str) -> None:
    file = tmp_path / "labelled.jsonl"
    file.write_text(content)
    fails(here("verify", demo.bundle, "--decisions", file), re.escape(message))


@pytest.mark.parametrize(
    ("chains", "together", "sweeps"),
    [([48], 4, 48), ([48] * 4, 2, 96), ([48, 49, 48], 2, 96), ([10, 10, 30], 2, 40)],
)
def test_sweeps_are_counted_as_requests_follow_each_other(
    chains: list[int], together: int, sweeps: int
) -> None:
    assert _most_sweeps(chains, together) == sweeps
