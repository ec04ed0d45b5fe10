"""Self-contained HTML reports: tables and inline plots."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import jinja2

from canvasrt.types import Json


def render_page(
    title: str,
    subjects: Sequence[str],
    sections: Sequence[Json],
    footer: str,
    verdict: Json | None = None,
) -> str:
    """Return HTML. `subjects` are lines below the title; `verdict` has `ok` and `text`; `section` makes the `sections`."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        files("canvasrt.pages").joinpath("page.html.j2").read_text(encoding="utf-8")
    )
    return template.render(
        title=title, subjects=subjects, sections=sections, footer=footer, verdict=verdict
    )


def section(
    title: str,
    note: str = "",
    plot: str | None = None,
    tables: Sequence[Any] = (),
    last_is_total: bool = False,
    empty: str = "",
) -> Json:
    """Return a section: `plot` is SVG, `tables` are pairs of heads and rows, `empty` replaces a table without rows."""
    return {
        "title": title,
        "note": note,
        "plot": plot,
        "tables": list(tables),
        "last_is_total": last_is_total,
        "empty": empty,
    }
