"""The README's tables of tensors are those of the models."""

from __future__ import annotations

from pathlib import Path

import pytest

from canvasrt.containers.tensors import STREAM_MODEL, Tensor, inputs_of, markdown_row, outputs_of

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize(
    "tensor", [*inputs_of(STREAM_MODEL), *outputs_of(STREAM_MODEL)], ids=lambda each: each.name
)
def test_the_readme_has_the_tensor(tensor: Tensor):
    assert markdown_row(tensor) in README.read_text(encoding="utf-8")
