"""The check of the kernels on a GPU, itself checked: on a fake device with Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from bench.rows import LayerOnDevice, routings
from canvasrt.sorted_rows import ahead
from canvasrt.sorted_rows.description import ExpertSizes
from tests.helpers.interpreted import SortingDevice, named_kernel

SIZES = ExpertSizes(experts=6, top_k=2, size=128, inner=64)


@pytest.mark.parametrize("format", [None, "int4", "fp8", "nvfp4"])
def test_rows_are_those_of_numpy(format: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "compile_kernel", named_kernel)
    layer = LayerOnDevice(SortingDevice(), SIZES, format, 24)
    for _, index in routings(SIZES, 24):
        layer.route(index)
        # bfloat16 keeps eight bits. A state between two codes of FP8 or NVFP4 may go either way.
        most = {"fp8": 0.05, "nvfp4": 0.25}.get(format or "", 0.01)
        assert layer.error(np.random.default_rng(0)) < most
    assert len(layer.seconds(1)) == (4 if format == "nvfp4" else 3)
    layer.x = layer.x[::-1]  # what NumPy computes is now of other tokens
    assert layer.error(np.random.default_rng(0)) > 0.5
