"""`canvasrt ask` with a bundle and with wrong files, and `canvasrt generate` with gaps and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from canvasrt.containers.client.openai import OpenAIClient
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


DECIDED = {"name": None, "type": "predicate", "probability": 0.5, "standard_error": None}
TOLD = {"answers": [DECIDED], "canvasrt": {"seed": 0, "passes": 1}, "usage": {"input_tokens": 3}}


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in TOLD),
        {"answers": []},
        {"answers": [{}]},
        {"answers": [{**DECIDED, "probability": "high"}]},
        {"usage": {"prompt_tokens": 3}},
    ],
)
def test_another_vendor_s_answer_may_lack_anything(
    tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    file = tmp_path / "questions.yaml"
    file.write_text("[{type: predicate, instructions: '?'}]")
    monkeypatch.setattr(OpenAIClient, "model", "theirs")
    for told in (TOLD | change, {name: TOLD[name] for name in TOLD if name not in change}):
        monkeypatch.setattr(OpenAIClient, "post", lambda *_, told=told: told)
        asked = here("ask", "http://127.0.0.1:9", file, "text")
        fails(asked, "answers at http://127.0.0.1:9/v1 .* Decisions API")
    monkeypatch.setattr(OpenAIClient, "post", lambda *_: TOLD)
    assert "0.5000" in here("ask", "http://127.0.0.1:9", file, "text").stdout


def test_generate_fills_gaps_and_shows_log_probabilities(demo: Pair, ask: Ask) -> None:
    filled = ask("generate", demo.bundle, "reverse planet", "--infill", "te{3}p")
    assert filled.strip() == "tenalp"
    found = json.loads(ask("generate", demo.bundle, "--infill", "te{3}p", "--json"))
    assert len(found["gaps"]) == 1
    options = ("--logprobs", "--top-logprobs", "2", "--json")
    scores = json.loads(ask("generate", demo.bundle, "12+34=", *options))["logprobs"]
    assert scores
    assert [len(each["top"]) for each in scores] == [2] * len(scores)
