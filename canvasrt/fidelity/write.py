"""Writes a report's three files: JSON, Markdown and a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from canvasrt.extras import require
from canvasrt.fidelity.markdown import markdown
from canvasrt.fidelity.quality_page import quality_page
from canvasrt.fidelity.reliability import reliability_lines, reliability_page
from canvasrt.fidelity.report import finite
from canvasrt.staging import check_output, staging


def check_report_folder(folder: Path) -> None:
    """Raise CanvasError, before anything is measured, if the report could not be written."""
    check_output(folder)
    require("matplotlib", "report")


def write_report(report: dict[str, Any], title: str, folder: Path) -> None:
    """Write report.json, report.md and report.html into an empty folder."""
    title = f"Quality of {title}"
    with staging(folder) as tmp:
        text = json.dumps(finite(report), indent=2, ensure_ascii=False) + "\n"
        (tmp / "report.json").write_text(text, encoding="utf-8")
        (tmp / "report.md").write_text(markdown(report, title), encoding="utf-8")
        (tmp / "report.html").write_text(quality_page(report, title), encoding="utf-8")


def write_decisions(report: dict[str, Any], title: str, folder: Path) -> None:
    """Write the report of labelled questions alone, as the same three files."""
    title = f"Decisions of {title}"
    footer = "Written by canvasrt verify."
    with staging(folder) as tmp:
        text = json.dumps(finite(report), indent=2, ensure_ascii=False) + "\n"
        (tmp / "report.json").write_text(text, encoding="utf-8")
        body = "\n".join([f"# {title}", *reliability_lines(report)]) + "\n"
        (tmp / "report.md").write_text(body, encoding="utf-8")
        (tmp / "report.html").write_text(reliability_page(report, title, footer), encoding="utf-8")
