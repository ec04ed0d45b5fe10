"""Reports as self-contained HTML with inline plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Return the report as HTML. `subjects` are the lines below the title, `sections` are results of `section`, and
    `verdict` has the keys `ok` and `text`."""
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
    """Return a section. `plot` is SVG; a table is a pair `(heads, rows)`; `empty` replaces a table without rows."""
    return {
        "title": title,
        "note": note,
        "plot": plot,
        "tables": list(tables),
        "last_is_total": last_is_total,
        "empty": empty,
    }


def table_of(
    items: Iterable[Any], columns: Mapping[str, Callable[[Any], Any]]
) -> tuple[list[str], list[list[str]]]:
    """Return a table's heads and rows. Each item is a row; each column's function turns the item into a cell."""
    return list(columns), [[str(pick(each)) for pick in columns.values()] for each in items]
