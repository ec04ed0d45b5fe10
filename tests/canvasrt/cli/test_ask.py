"""`canvasrt ask` with a bundle and with wrong files, and `canvasrt generate` with gaps and scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from canvasrt.recipes.fields import read_yaml
from tests.canvasrt.cli.conftest import Ask, fails
from tests.conftest import Command
from tests.helpers.reference import Pair

QUESTIONS = """
layout: bare
samples: 2
questions:
  - {type: choice, name: sum, instructions: "?", choices: [{value: "46"}, {value: "45"}]}
"""


def test_a_bundle_answers(demo: Pair, tmp_path: Path, ask: Ask) -> None:
    file = tmp_path / "questions.yaml"
    file.write_text(QUESTIONS)
    found = json.loads(ask("ask", demo.bundle, file, "12+34=", "--json"))
    assert found["answers"][0]["choice"] == "46"
    assert found["passes"] == 2
    assert "46" in ask("ask", demo.bundle, file, "12+34=", "--samples", "1")


def test_yes_and_no_are_words(tmp_path: Path) -> None:
    file = tmp_path / "questions.yaml"
    file.write_text("[yes, No, on, true, False, truest]")
    assert read_yaml(file, "") == ["yes", "No", "on", True, False, "truest"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- [", "is not YAML"),
        ("- 2026-13-01", "is not YAML"),
        ("{}", "holds no questions"),
        ("[{type: x}]", "type is 'x'"),
        (QUESTIONS.replace("samples", "sample"), "sample is unknown"),  # a server would ignore it
    ],
)
def test_wrong_files(tmp_path: Path, here: Command, content: str, message: str) -> None:
    file = tmp_path / "questions.yaml"
    file.write_text(content)
    fails(here("ask", "http://127.0.0.1:9", file, "text"), message)


def test_generate_fills_gaps_and_shows_log_probabilities(demo: Pair, ask: Ask) -> None:
    filled = ask("generate", demo.bundle, "reverse planet", "--infill", "te{3}p")
    assert filled.strip() == "tenalp"
    found = json.loads(ask("generate", demo.bundle, "--infill", "te{3}p", "--json"))
    assert len(found["gaps"]) == 1
    options = ("--logprobs", "--top-logprobs", "2", "--json")
    scores = json.loads(ask("generate", demo.bundle, "12+34=", *options))["logprobs"]
    assert scores
    assert [len(each["top"]) for each in scores] == [2] * len(scores)
