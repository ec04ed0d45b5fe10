"""`bench rows` on a fake device, whose kernels run in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from bench.rows import LayerOnDevice, routings
from canvasrt.sorted_rows import ahead
from canvasrt.sorted_rows.description import ExpertSizes
from tests.helpers.interpreted import SortingDevice, named_kernel

# The formats of the two products' weights. Every format occurs once in each product.
PAIRS = [(None, "int4"), ("int4", "nvfp4"), ("fp8", None), ("nvfp4", "fp8")]
SIZES = ExpertSizes(experts=6, top_k=2, size=128, inner=64)


@pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: "-".join(map(str, pair)))
def test_rows_are_those_of_numpy(
    formats: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "compile_kernel", named_kernel)
    layer = LayerOnDevice(SortingDevice(), SIZES, formats, 24)
    for _, index in routings(SIZES, 24):
        layer.route(index)
        # bfloat16 keeps eight bits. A number midway between two codes of FP8 or NVFP4 may be rounded up or down.
        most = {"fp8": 0.05, "nvfp4": 0.25}.get(formats[1] or "", 0.01)
        assert layer.error(np.random.default_rng(0)) < most
    assert len(layer.seconds(1)) == (4 if formats[0] == "nvfp4" else 3)
    layer.x = layer.x[::-1]  # NumPy now computes with other tokens than the device
    assert layer.error(np.random.default_rng(0)) > 0.5
