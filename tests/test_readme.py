"""The tables of the README match the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from canvasrt.build.fit import released_fit
from canvasrt.containers.serve.settings import Settings
from canvasrt.formats import FORMATS, PLAIN
from canvasrt.targets import GB, TARGETS, Target

README = Path(__file__).parents[1] / "README.md"

# Columns in which a row shared by two targets may have two values.
_SPLIT = ("memory", "capability")


def test_the_readme_calls_the_model_as_it_is_served():
    models = re.findall(r'"model": "([^"]+)"', README.read_text("utf-8"))
    assert models
    assert set(models) <= set(Settings().front.names)


def target_rows() -> dict[str, dict[str, str]]:
    """Return each target's cells in the table of targets, by column. Two targets may share a row."""
    lines = README.read_text("utf-8").splitlines()
    head = next(line for line in lines if line.startswith("| target |"))
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    rows: dict[str, dict[str, str]] = {}
    for line in lines[lines.index(head) + 2 :]:
        if not line.startswith("|"):
            break
        cells = dict(
            zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True)
        )
        names = re.findall(r"`([\w-]+)`", cells["target"])
        for place, name in enumerate(names):
            rows[name] = {
                column: (text.split(", ") * len(names))[place]
                if column in _SPLIT and len(names) > 1
                else text
                for column, text in cells.items()
            }
    return rows


def listed() -> set[str]:
    """Return the precisions that the table lists for any GPU. `canvasrt targets` lists all precisions."""
    rows = [target_rows()[target.name] for target in TARGETS if target.memory is not None]
    return {name for row in rows for name in row["precisions"].split(", ")}


def test_the_readme_lists_every_default():
    assert listed() >= {target.precision for target in TARGETS if target.memory is not None}
    assert listed() <= {*FORMATS, *PLAIN}


def test_the_readme_has_every_target_and_no_other():
    assert sorted(target_rows()) == sorted(target.name for target in TARGETS)


@pytest.mark.parametrize("target", TARGETS, ids=lambda each: each.name)
def test_the_readme_describes_the_target(target: Target):
    row = target_rows()[target.name]
    fit = released_fit(target)
    assert fit is not None
    assert row["26B model"] == f"{fit.precision}, {fit.memory.total / 1e9:.1f} GB"
    assert row["builder"].replace(" ", "-").lower().replace("onnx-", "onnx") == target.builder
    if target.memory is None:
        return
    assert row["precisions"].split(", ") == [each for each in target.precisions if each in listed()]
    assert row["memory"].removesuffix(" GB") == str(target.memory // GB)
    assert row["capability"] == target.capability_text
