"""Noise equals published values, and depends only on seed, block and step."""

import numpy as np
import pytest

from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.sampling_params import MAX_UINT64 as MAX_SEED


def test_the_published_values() -> None:
    first = step_noise(7, 0, 0, 256, 262_144)[1]
    second = step_noise(7, 0, 1, 256, 262_144)[1]
    assert first[:4].tolist() == [62241, 104648, 139721, 252200]
    assert second[:4].tolist() == [75149, 62490, 115111, 171074]


def test_follows_the_written_formula() -> None:
    raw = np.random.Philox(key=3, counter=[0, 0, 5, 2]).random_raw(64)
    uniforms, tokens = step_noise(3, 2, 5, 32, 1000)
    assert uniforms.tolist() == [(int(r) >> 40) * 2.0**-24 for r in raw[:32]]
    assert tokens.tolist() == [((int(r) >> 32) * 1000) >> 32 for r in raw[32:]]


@pytest.mark.parametrize("vocab_size", [1, 112, 512, 262_144])
def test_ranges_and_types(vocab_size: int) -> None:
    uniforms, tokens = step_noise(MAX_SEED, 9, 4, 4096, vocab_size)
    assert uniforms.dtype == np.float32
    assert tokens.dtype == np.int64
    assert 0 <= uniforms.min() < 0.01
    assert 0.99 < uniforms.max() < 1
    assert 0 <= tokens.min() <= tokens.max() < vocab_size
