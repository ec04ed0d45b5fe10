"""The table of predictions agrees with build plans on what fits a GPU's memory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from bench import predict
from bench.predict import fits
from canvasrt.roofline.rates import find_gpu
from canvasrt.targets import find_target

TABLE = Path("bench/results/predicted.json")


def predicted(*keys: str) -> list[dict[str, Any]]:
    """Return the values of these keys in every row of the table."""
    table = json.loads(TABLE.read_text())
    return [dict(zip(table["columns"], row, strict=True)) for key in keys for row in table[key]]


def test_the_page_has_the_predicted_passes() -> None:
    """docs/performance.md compares recipes and both forms of experts at one context."""
    cells: dict[tuple[str, str, int], str] = {}
    for row in predicted("rows"):
        if row["context"] == 1024:
            shown = "does not fit" if row["fits"] == "no" else str(row["ms"])
            cells[row["recipe"], row["gpu"], row["batch"]] = shown
    lines = Path("docs/performance.md").read_text("utf-8").splitlines()
    (head,) = [line for line in lines if line.startswith("| recipe | ")]
    gpus = head.strip("| ").split(" | ")[1:]
    found = 0
    for recipe in {name for name, *_ in cells}:
        for line in lines:
            if line.startswith(f"| `{recipe}` | "):
                for gpu, shown in zip(gpus, line.strip("|").split("|")[1:], strict=True):
                    one, four = (cells.get((recipe, gpu, batch), "") for batch in (1, 4))
                    both = one if one == four else f"{one} ({four})"
                    assert shown.strip() == both, (recipe, gpu)
                    found += 1
    assert found > 20


def test_the_table_marks_what_fits() -> None:
    rows = predicted("rows", "sorted_rows")
    assert len(rows) > 300
    for row in rows:
        target = find_target(row["gpu"])
        assert row["fits"] == fits(row["recipe"], target, row["batch"], row["context"]), row


@pytest.mark.parametrize(("batch", "context"), [(4, 24_576), (7, 1024)])
def test_fp8_on_an_rtx_5090_leaves_images_out_where_they_would_not_fit(
    batch: int, context: int
) -> None:
    target = find_target("rtx-5090")
    assert fits("fp8", target, batch, context) == "without images"
    assert fits("fp8", target, 8, 32_768) == "no"


def test_engines_over_sorted_rows_are_predicted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = SimpleNamespace(graphs=SimpleNamespace(path=tmp_path))
    monkeypatch.setattr(predict.shape, "prepare", lambda *given: prepared)
    monkeypatch.setattr(predict.shape, "quantized", lambda *given: prepared)
    monkeypatch.setattr(predict, "build_bundle", lambda graphs, target, *rest: rest)
    out, options = predict.engines("int4", tmp_path, 4, "sorted")
    assert (out.name, options.experts) == ("engines-int4-4-sorted", "sorted")
    assert predict.engines("int4", tmp_path, 4)[0] != out
    predictor: Any = MagicMock(experts="sorted")
    # With sorted rows, no expert can overflow, so padded canvases share a pass.
    found = predict.padded_seconds(predictor, find_gpu("h100"), 4, 1024)
    assert found is predictor.denoise.return_value.seconds
