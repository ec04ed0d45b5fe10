"""What `bench.sorted` makes of three layers' kernels, against bytes counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.sorted import SortedPasses
from canvasrt.bundle import Bundle
from canvasrt.defaults import SORTED
from canvasrt.kernels.rates import GpuRates, find_gpu
from tests.canvasrt.kernels.conftest import Released

GPU = find_gpu("rtx-5090")
LAYERS, EXPERTS, D, INNER = 30, 128, 2816, 704
# NVFP4, with a scale for 16 numbers.
BYTES = 9 / 16


@pytest.fixture(scope="module")
def built(released: Released) -> Bundle:
    return released("nvfp4", "rtx-5090", SORTED)


def products(bundle: Bundle, rows: int, share: float = 1.0, gpu: GpuRates = GPU) -> float:
    """Return what rows take in products, if every expert has as many: without them, there are launches."""
    passes = SortedPasses(bundle, gpu, 1, 1024, share)
    loads = np.full((LAYERS, EXPERTS), rows)
    return passes.seconds(loads) - passes.seconds(0 * loads)


def test_weights_are_read_once_and_rows_written_once(built: Bundle) -> None:
    weights = EXPERTS * (3 * D * INNER * BYTES + 4 * (2 * INNER + D))
    # Read by the first product, written and read in between, and written in 16 bits by the second.
    rows = EXPERTS * 16 * (D * BYTES + 2 * INNER * BYTES + 2 * D)
    seconds = LAYERS * (weights + rows) / (GPU.bandwidth * GPU.reached)
    assert products(built, 16) == pytest.approx(seconds, rel=1e-3)
    # Blocks are of 16 rows, of which empty ones are neither read nor written.
    seconds -= LAYERS * rows * 13 / 16 / (GPU.bandwidth * GPU.reached)
    assert products(built, 3) == pytest.approx(seconds, rel=1e-3)


def test_empty_rows_of_blocks_are_computed(built: Bundle) -> None:
    slow = replace(GPU, bandwidth=1e30, rates={**GPU.rates, "fp4": 1e12})
    operations = 2 * LAYERS * EXPERTS * 16 * 3 * D * INNER
    for rows, blocks in ((3, 1), (16, 1), (17, 2)):
        seconds = blocks * operations / (1e12 * GPU.arithmetic)
        assert products(built, rows, gpu=slow) == pytest.approx(seconds, rel=1e-3)


def test_a_share_of_the_rates_is_that_of_our_kernels_alone(built: Bundle) -> None:
    assert products(built, 16, share=0.5) == pytest.approx(2 * products(built, 16))
    none = np.zeros((LAYERS, EXPERTS), int)
    whole, half = (SortedPasses(built, GPU, 1, 1024, s).seconds(none) for s in (1.0, 0.5))
    # The sort and the rounding, 2.2 MB per layer.
    assert 0 < half - whole < LAYERS * 2 * 2.3e6 / (GPU.bandwidth * GPU.reached)
