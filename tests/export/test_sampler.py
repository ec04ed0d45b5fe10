"""Parts of the sampler: the inverse-CDF draw, acceptance, and the vocabulary's grid."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from canvasrt.export.head import accept, draw, vocabulary_grid


@pytest.mark.parametrize(
    ("size", "grid"), [(262_144, (512, 512)), (112, (8, 14)), (391, (17, 23)), (13, (1, 13))]
)
def test_vocabulary_grid(size: int, grid: tuple[int, int]) -> None:
    assert vocabulary_grid(size) == grid


@pytest.mark.parametrize("size", [13, 112, 4096])
def test_draw_is_the_first_token_past_the_target(size: int) -> None:
    """Compares with a running sum in float64, except for uniforms so close to a token's boundary that rounding
    decides."""
    random = np.random.default_rng(size)
    mass = random.gamma(0.1, size=(2, 200, size)).astype(np.float32)
    uniforms = random.random((2, 200), np.float32)
    tokens = draw(torch.from_numpy(mass), torch.from_numpy(uniforms), vocabulary_grid(size)).numpy()
    sums = mass.astype(np.float64).cumsum(-1)
    targets = uniforms[..., None] * sums[..., -1:]
    expected = (sums <= targets).sum(-1)
    clear = (np.abs(sums - targets) > 1e-5 * sums[..., -1:]).all(-1)
    assert clear.mean() > 0.9
    assert (tokens == expected)[clear].all()
    assert len(np.unique(tokens)) > 10


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_draw_never_takes_a_token_without_mass(uniform: float) -> None:
    """Uniforms are at both ends of [0, 1), and few tokens have mass. By rounding, the target may exceed the row's
    sum."""
    random = np.random.default_rng(0)
    mass = random.random((1, 500, 64), np.float32) * (random.random((1, 500, 64)) < 0.1)
    mass[..., 5] = 1e-8
    tokens = draw(
        torch.from_numpy(mass.astype(np.float32)), torch.full((1, 500), uniform), (8, 8)
    ).numpy()
    assert (np.take_along_axis(mass, tokens[..., None], -1) > 0).all()
    held = mass > 0
    first, last = held.argmax(-1), 63 - held[..., ::-1].argmax(-1)
    assert (tokens == (first if uniform == 0 else last)).mean() > 0.99


def test_accept_keeps_the_most_certain_while_the_sum_before_is_within_the_bound() -> None:
    entropy = torch.tensor([[0.3, 0.05, 2.0, 0.04], [5.0, 6.0, 7.0, 8.0]])
    kept = accept(entropy, torch.tensor([0.1, 0.1]))
    assert kept.tolist() == [[True, True, False, True], [True, False, False, False]]
