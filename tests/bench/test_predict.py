"""The tables of predictions mark what fits a GPU's memory, as a build's plan says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.predict import fits
from canvasrt.targets import find_target

PAGE = Path("docs/performance.md")
BATCH = re.compile(r"^Batch (\d+):$")
CONTEXTS = (1024, 32_768, 262_144)


def marked(cell: str) -> str:
    """Return what a cell's mark says."""
    if cell.startswith("*"):
        return "no"
    return "without images" if cell.endswith("†") else "yes"


def cells() -> Iterator[tuple[str, str, int, int, str]]:
    """Yield recipe, GPU, batch, context and mark of each prediction, in both kinds of tables."""
    batch = 0
    for line in PAGE.read_text().splitlines():
        row = [each.strip() for each in line.strip("|").split("|")]
        if found := BATCH.match(line):
            batch = int(found[1])
        elif line.startswith("#"):
            batch = 0
        elif line.startswith("| ") and len(row) == 5 and batch and "×" in line:
            yield from ((*row[:2], batch, n, c) for n, c in zip(CONTEXTS, row[2:], strict=True))
        elif len(row) == 6 and "→" in line and row[2].isdigit():
            rest = zip(CONTEXTS, row[3:], strict=True)
            yield from ((*row[:2], int(row[2]), n, c) for n, c in rest)


def test_the_tables_mark_what_fits() -> None:
    found = list(cells())
    assert len(found) > 250
    wrong = [
        (*where, cell)
        for *where, cell in found
        for recipe, gpu, batch, context in [where]
        if marked(cell) != fits(str(recipe), find_target(str(gpu)), int(batch), int(context))
    ]
    assert not wrong


@pytest.mark.parametrize(("batch", "context"), [(4, 24_576), (8, 1024)])
def test_fp8_on_an_rtx_5090_leaves_images_out_where_they_would_not_fit(
    batch: int, context: int
) -> None:
    target = find_target("rtx-5090")
    assert fits("fp8", target, batch, context) == "without images"
    assert fits("fp8", target, 8, 32_768) == "no"
