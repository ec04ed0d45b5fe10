"""HTML reports: the content of sections, in which users' input is escaped."""

from __future__ import annotations

import pytest

from canvasrt import pages
from canvasrt.pages import drawing


def test_a_page_shows_its_sections_and_verdict() -> None:
    sections = [
        pages.section("Speed", "per pass", tables=[(("what", "ms"), [("encode", "1.5")])]),
        pages.section("Plot", plot="<svg></svg>"),
        pages.section("Errors", tables=[(("what",), [])], empty="there were none"),
    ]
    page = pages.render_page(
        "Report", ["one bundle"], sections, "made today", {"ok": True, "text": "fine"}
    )
    for text in ("<h1>Report", "one bundle", "Speed", "per pass", "encode", "1.5", "made today"):
        assert text in page
    for text in ("there were none", "fine", '<div class="scroll"><svg></svg></div>'):
        assert text in page
    assert "prefers-color-scheme: dark" in page


def test_what_is_given_is_text_and_not_html() -> None:
    name = "<script>alert(1)</script>"
    section = pages.section(name, name, tables=[((name,), [(name,)])])
    page = pages.render_page(name, [name], [section], name, {"ok": False, "text": name})
    assert name not in page
    assert page.count("&lt;script&gt;") >= 7


def test_a_drawing_is_described_and_reproducible() -> None:
    pytest.importorskip("matplotlib", reason="needs canvasrt[report]")

    def draw(values: list[float]) -> object:
        figure, axes = drawing.figure_of(2.0)
        axes.plot(values)
        return figure

    first, again = (drawing.drawing("line", "a rising line", draw, [1, 2]) for _ in range(2))
    assert first.startswith('<svg role="img" aria-label="a rising line"')
    assert first == again
    assert drawing.drawing("line", "a rising line", draw, [2, 1]) != first
