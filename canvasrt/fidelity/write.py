"""Writes a report's two files: JSON and a page."""

from __future__ import annotations

import json
from pathlib import Path

from canvasrt.extras import require
from canvasrt.fidelity.plots import plots
from canvasrt.fidelity.reliability import calibration_verdict, diagram, reliability_sections
from canvasrt.fidelity.report import finite
from canvasrt.fidelity.sections import sections, subject, verdict, versions
from canvasrt.pages import render_page
from canvasrt.staging import check_output, staging
from canvasrt.types import Json

_FOOTER = "Written by canvasrt verify"


def check_report_folder(folder: Path) -> None:
    """Raise CanvasError if the report could not be written later. Called before anything is measured."""
    check_output(folder)
    require("matplotlib", "report")


def write_report(report: Json, title: str, folder: Path) -> None:
    """Write report.json and report.html into an empty folder."""
    title = f"Quality of {title}"
    found = list(sections(report, plots(report)))
    about = [each for each in (subject(report), report["recipe_description"]) if each]
    said = {"ok": report["ok"], "text": verdict(report)}
    page = render_page(title, about, found, f"{_FOOTER}; {versions(report)}.", said)
    _write(folder, report, page)


def write_decisions(report: Json, title: str, folder: Path) -> None:
    """Write a report that covers only labelled questions, to the same two files."""
    title = f"Decisions of {title}"
    found = list(reliability_sections(report, {"reliability": diagram(report)}))
    page = render_page(title, [calibration_verdict(report)], found, f"{_FOOTER}.")
    _write(folder, report, page)


def _write(folder: Path, report: Json, page: str) -> None:
    with staging(folder) as tmp:
        text = json.dumps(finite(report), indent=2, ensure_ascii=False) + "\n"
        (tmp / "report.json").write_text(text, encoding="utf-8")
        (tmp / "report.html").write_text(page, encoding="utf-8")
