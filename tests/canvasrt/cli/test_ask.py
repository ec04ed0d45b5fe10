"""`canvasrt ask`, on a bundle and on wrong files; `canvasrt generate` with gaps and scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from canvasrt.cli.app import run
from tests.helpers.reference import Pair

QUESTIONS = """
layout: bare
samples: 2
questions:
  - {type: choice, name: sum, instructions: "?", choices: [{value: "46"}, {value: "45"}]}
"""


def test_a_bundle_answers(demo: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "questions.yaml"
    file.write_text(QUESTIONS)
    assert run(["ask", str(demo.bundle), str(file), "12+34=", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answers"][0]["choice"] == "46"
    assert found["passes"] == 2
    assert run(["ask", str(demo.bundle), str(file), "12+34=", "--samples", "1"]) == 0
    assert "46" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [("- [", 1, "is not YAML"), ("{}", 1, "holds no questions"), ("[{type: x}]", 1, "type is 'x'")],
)
def test_wrong_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, code: int, message: str
) -> None:
    file = tmp_path / "questions.yaml"
    file.write_text(content)
    assert run(["ask", str(tmp_path), str(file), "text"]) == code
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_misspelt_field_is_named_before_a_server_would_ignore_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "questions.yaml"
    file.write_text(QUESTIONS.replace("samples", "sample"))
    assert run(["ask", "http://127.0.0.1:9", str(file), "text"]) == 1
    assert "sample is unknown" in capsys.readouterr().err


def test_generate_fills_gaps_and_shows_log_probabilities(
    demo: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = str(demo.bundle)
    assert run(["generate", bundle, "reverse planet", "--infill", "te{3}p"]) == 0
    assert capsys.readouterr().out.strip() == "tenalp"
    assert run(["generate", bundle, "--infill", "te{3}p", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["gaps"]) == 1
    assert run(["generate", bundle, "12+34=", "--logprobs", "--top-logprobs", "2", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["logprobs"]
    assert [len(each["top"]) for each in scores] == [2] * len(scores)
    assert scores
