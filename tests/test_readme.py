"""The README's tables match the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from canvasrt.containers.serve.settings import Settings
from canvasrt.containers.tensors import STREAM_MODEL, Tensor, inputs_of, outputs_of

README = Path(__file__).parents[1] / "README.md"
TENSORS = [*inputs_of(STREAM_MODEL), *outputs_of(STREAM_MODEL)]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda each: each.name)
def test_the_readme_has_the_tensor(tensor: Tensor):
    shape = ", ".join(map(str, tensor.shape))
    row = f"| `{tensor.name}` | {tensor.datatype} | [{shape}] | "
    assert row in README.read_text(encoding="utf-8")


def test_the_readme_has_no_other():
    rows = re.findall(r"^\| `(\w+)` \| [A-Z0-9]+ \| \[", README.read_text("utf-8"), re.MULTILINE)
    assert rows == [tensor.name for tensor in TENSORS]


def test_the_readme_calls_the_model_as_it_is_served():
    models = re.findall(r'"model": "([^"]+)"', README.read_text("utf-8"))
    assert models
    assert set(models) <= set(Settings().front.names)
