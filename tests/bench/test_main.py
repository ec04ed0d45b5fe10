"""The command `python -m bench`, and measurements that build no engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import MEASUREMENTS, main
from bench.results import tables
from bench.tables import PAGES, filled
from tests.helpers.reference import Pair


def test_measurements_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == list(MEASUREMENTS)
    assert main(["speed"]) == 2
    assert capsys.readouterr().out == listed


@pytest.mark.acceptance
@pytest.mark.parametrize("name", MEASUREMENTS)
def test_options_are_described(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "rows":
        pytest.importorskip("triton", reason="needs canvasrt[sorted]")
    assert main([name, "--help"]) == 0
    assert "--out" in capsys.readouterr().out or name in ("picture", "image-demo", "tables")


def test_figures_are_shown_as_tables() -> None:
    shown = tables({"device": "x", "none": [], "rows": [{"a": 1, "b": 0.12345}, {"b": None}]})
    assert shown == ("device: x\n\nrows:\n\n| a | b |\n| --- | --- |\n| 1 | 0.123 |\n| – | – |\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_the_tables_of_their_files(page: Path) -> None:
    """If this fails, run `.venv/bin/python -m bench tables`."""
    text = page.read_text("utf-8")
    assert text == filled(text)
    comments = [line for line in text.splitlines() if line.startswith("<!-- bench/results/")]
    assert sorted(comments) == sorted(set(comments)), "a table stands twice"


@pytest.mark.acceptance
def test_answers_and_questions_are_measured(demo: Pair, tmp_path: Path) -> None:
    out = tmp_path / "answers.json"
    assert main(["answers", str(demo.bundle), "--rounds", "1", "-o", str(out)]) == 0
    figures = json.loads(out.read_text())["figures"]
    assert [row["questions"] for row in figures["reads"]] == [1, 10]
    assert len(figures["constrained answers"]) == 3
    line = ["questions", str(demo.bundle), "-o", str(out)]
    assert main([*line, "--settings", "16"]) == 0
    rows = {row["setting"]: row for row in json.loads(out.read_text())["figures"]["settings"]}
    plain, early = rows["as it is"], rows["`settle_steps` 1"]
    assert early["steps to first text"] <= plain["steps to first text"] <= plain["steps"]
    assert main([*line, "--scores", "8"]) == 0
    assert len(json.loads(out.read_text())["figures"]["scores"]) == 2
