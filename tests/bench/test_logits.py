"""bench.logits: what it rounds to, and what it compares."""

from __future__ import annotations

import torch

from bench.logits import divergence, fp8, nvfp4

E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_rows_are_rounded_to_codes_and_scales_of_blocks() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    blocks = nvfp4(x).view(4, 4, 16).abs()
    # Each block's largest number has the largest code.
    codes = blocks / blocks.amax(-1, keepdim=True) * 6
    assert ((codes[..., None] - E2M1_VALUES).abs().amin(-1) < 1e-5).all()
    assert (blocks.amax(-1) / x.view(4, 4, 16).abs().amax(-1) - 1).abs().max() < 0.07
    assert 0 < (fp8(x) / x - 1).abs().max() < 0.07


def test_fewer_bits_diverge_more() -> None:
    random = torch.Generator().manual_seed(1)
    hidden, table = torch.randn(256, 64, generator=random), torch.randn(128, 64, generator=random)
    none, every = divergence(hidden, table, lambda x: x, 30.0)
    assert every == 1.0
    assert none.abs().max() == 0
    eight, four = (divergence(hidden, table, each, 30.0)[0].mean() for each in (fp8, nvfp4))
    assert 0 < 10 * eight < four
