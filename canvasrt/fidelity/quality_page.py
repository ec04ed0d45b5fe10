"""The quality report as one self-contained page: tables and inline plots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from canvasrt.fidelity import markdown as text
from canvasrt.fidelity.plots import plots
from canvasrt.fidelity.reliability import sections as reliability_sections
from canvasrt.pages import render_page, section
from canvasrt.types import Json


def quality_page(report: Json, title: str) -> str:
    """Return the page as HTML. Raises CanvasError if matplotlib is not installed."""
    drawn = plots(report)
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return render_page(
        title,
        [each for each in (text.subject(report), report["recipe_description"]) if each],
        list(_blocks(report, drawn)),
        f"Written by canvasrt verify; {versions}.",
        {"ok": report["ok"], "text": text.verdict(report)},
    )


def _blocks(report: Json, drawn: Json) -> Iterator[Json]:
    """Yield the page's sections: a title, a note, plots and tables."""
    limits = [[cell.strip("*") for cell in row] for row in text.limit_rows(report)]
    heads = ["", "measured", "limit", ""]
    yield section("Limits", tables=[(heads, limits)], empty="The recipe sets none.")
    steps = [(text.STEP_HEADS, text.step_rows(report))]
    yield section("Denoising steps", text.steps_note(report), drawn.get("steps"), steps)
    if report["answers"]:
        answers = [(text.ANSWER_HEADS, text.answer_rows(report))]
        note = text.answers_note(report)
        yield section("Exact answers", note, drawn["answers"], answers) | {"last_is_total": True}
    if report.get("decisions"):
        yield from reliability_sections(report["decisions"])
    if report["pace"]:
        pace = [(text.PACE_HEADS, text.pace_rows(report))]
        yield section("Pace", text.pace_note(report), drawn.get("pace"), pace)
    if report["segments"]:
        segments = [(text.SEGMENT_HEADS, text.segment_rows(report))]
        yield section("Segments", text.parts_note(report), drawn["segments"], segments)
        yield section("Layers", "", drawn["layers"])
        experts: list[Any] = [
            (text.EXPERT_HEADS, text.expert_rows(report)),
            (text.WEIGHT_HEADS, text.weight_rows(report)),
        ]
        note = text.experts_note(report)
        yield section(
            "Experts and matrices, worst first",
            note,
            drawn["experts"],
            experts,
            empty="None loses anything.",
        )
