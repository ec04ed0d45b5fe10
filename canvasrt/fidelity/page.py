"""The quality report as one self-contained page: tables and inline plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

import jinja2

from canvasrt.fidelity import markdown as text
from canvasrt.fidelity.plots import plots

Json = dict[str, Any]


def page(report: Json, title: str) -> str:
    """Return the page as HTML. Raises CanvasError if matplotlib is not installed."""
    drawn = plots(report)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        files("canvasrt.fidelity").joinpath("page.html.j2").read_text(encoding="utf-8")
    )
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return template.render(
        title=title,
        report=report,
        subject=text.subject(report),
        verdict=text.verdict(report),
        limits=[[cell.strip("*") for cell in row] for row in text.limit_rows(report)],
        blocks=list(_blocks(report, drawn)),
        versions=f"Written by canvasrt verify; {versions}.",
    )


def _blocks(report: Json, drawn: Json) -> Iterator[Json]:
    """Yield the page's sections: a title, a note, plots and tables."""
    steps = [(text.STEP_HEADS, text.step_rows(report))]
    yield _block("Denoising steps", text.steps_note(report), drawn.get("steps"), steps)
    if report["answers"]:
        answers = [(text.ANSWER_HEADS, text.answer_rows(report))]
        note = text.answers_note(report)
        yield _block("Exact answers", note, drawn["answers"], answers) | {"last_is_total": True}
    if report["pace"]:
        pace = [(text.PACE_HEADS, text.pace_rows(report))]
        yield _block("Pace", text.pace_note(report), drawn.get("pace"), pace)
    if report["segments"]:
        segments = [(text.SEGMENT_HEADS, text.segment_rows(report))]
        yield _block("Segments", text.parts_note(report), drawn["segments"], segments)
        yield _block("Layers", "", drawn["layers"], [])
        experts: list[Any] = [
            (text.EXPERT_HEADS, text.expert_rows(report)),
            (text.WEIGHT_HEADS, text.weight_rows(report)),
        ]
        note = text.experts_note(report)
        yield _block("Experts and matrices, worst first", note, drawn["experts"], experts)


def _block(title: str, note: str, plot: str | None, tables: Sequence[Any]) -> Json:
    return {"title": title, "note": note, "plot": plot, "tables": tables, "last_is_total": False}
