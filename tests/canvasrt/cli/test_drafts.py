"""Drafts with more lines than the terminal."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from canvasrt.cli.chat import _draw
from canvasrt.cli.generate_output import tail


def test_the_end_of_a_long_draft_stays_in_view() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=20, height=10)
    text = Text("\n".join(f"row {i}" for i in range(30)))
    text.append(" of the words that follow it", "bold")  # wraps onto a further row
    with Live(console=console, transient=True, auto_refresh=False) as live:
        live.update(tail(text, console), refresh=True)
        shown = out.getvalue()
    rows = shown.splitlines()[-9:]
    assert [row for row in rows if "…" in row] == []
    assert "row 22" in rows[0]
    assert "row 28" in rows[6]
    assert "follow it" in rows[8]
    assert "row 21" not in shown
    assert len(tail(text, console).wrap(console, 20)) < console.height


def test_a_short_draft_is_shown_whole() -> None:
    console = Console(file=io.StringIO(), width=20, height=10)
    text = Text("one ")
    text.append("two", "dim")
    text.append("\n\nthree", "bold")
    drawn = tail(text, console)
    assert drawn.plain == text.plain
    assert [span.style for span in drawn.spans if span.style] == ["dim", "bold"]


def test_a_chats_answer_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    said = "a[i]\t[/b]" + " x" * 200
    client: Any = SimpleNamespace(events=lambda inputs, drafts: [(said, None)])
    assert _draw(client, {}) == said
    assert capsys.readouterr().out.endswith(f"{said}\n")
