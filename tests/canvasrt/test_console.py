"""Progress on a terminal."""

from __future__ import annotations

import io

import pytest

from canvasrt.console import console, progress, table
from canvasrt.progress import report

WORK = ("loading", "building", "asking")


def test_a_stage_of_unknown_length_ends_when_other_work_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setenv("TERM", "dumb")  # without control codes, a bar is printed once, at the end
    with progress():
        report("loading")
        report("building", 0, 1)
        report("asking", 1, 2)
    lines = [line for line in shown.getvalue().splitlines() if "%" in line]
    ended = {name: "100%" in line for name in WORK for line in lines if name in line}
    assert ended == {"loading": True, "building": False, "asking": False}


def test_a_terminal_that_claims_no_columns_shows_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    console().print(table(["name", "size"], [["a", "1"]]))
    assert capsys.readouterr().out.split() == ["name", "size", "a", "1"]


def test_without_a_terminal_the_time_left_is_said_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter((0.0, 100.0, 400.0, 500.0, 800.0))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with progress():
        for done in range(5):
            report("calibrating", done, 4)
    said = capsys.readouterr().err.splitlines()
    assert said == ["calibrating", "calibrating: 50%, 6 min left"]
