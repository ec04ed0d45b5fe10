"""Sampling parameters: defaults, limits, and the reference's temperature schedule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    LinearTemperatureScheduleLogitsProcessor,
)

from canvasrt.checkpoints.config import SamplerDefaults
from canvasrt.errors import CanvasError
from canvasrt.runtime.sampling_params import COLDEST, SamplingParams
from tests.helpers.configs import CONFIG as SMALL

CONFIG = replace(SMALL, canvas_length=32, eos_token_ids=(1, 106, 50))


def test_defaults_are_the_checkpoints() -> None:
    defaults = SamplerDefaults(max_denoising_steps=7, entropy_bound=0.3, max_new_tokens=40)
    params = SamplingParams.from_defaults(defaults, CONFIG)
    assert params.max_denoising_steps == 7
    assert params.entropy_bound == 0.3
    assert params.max_new_tokens == 40
    assert params.eos_token_ids == (1, 106, 50)
    assert params.seed == 0


def test_overrides_win_and_none_is_no_override() -> None:
    params = SamplingParams.from_defaults(
        SamplerDefaults(), CONFIG, seed=4, t_min=None, max_new_tokens=5, eos_token_ids=3
    )
    assert (params.seed, params.t_min, params.max_new_tokens) == (4, 0.4, 5)
    assert params.eos_token_ids == (3,)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (32, 1), (33, 2), (96, 3)])
def test_blocks(tokens: int, blocks: int) -> None:
    assert SamplingParams(max_new_tokens=tokens).blocks(CONFIG) == blocks


@pytest.mark.parametrize(
    ("t_min", "t_max", "steps"), [(0.4, 0.8, 48), (0.0, 1.7, 7), (0.1, 0.3, 1)]
)
def test_the_schedule_is_the_references_to_the_last_bit(
    t_min: float, t_max: float, steps: int
) -> None:
    params = SamplingParams(t_min=t_min, t_max=t_max, max_denoising_steps=steps)
    processor = LinearTemperatureScheduleLogitsProcessor(t_min, t_max, steps)
    scores = torch.linspace(-30, 30, 101)
    for step in range(1, steps + 1):
        remaining = torch.tensor(steps - step + 1, dtype=torch.int32)
        expected = processor(None, scores, cur_step=remaining).numpy()
        assert (scores.numpy() / params.temperature_at(step) == expected).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": True}, "seed is True"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 4097}, "max_new_tokens is 4097"),
        ({"max_denoising_steps": 0}, "max_denoising_steps is 0"),
        ({"stability_threshold": -1}, "stability_threshold is -1"),
        ({"entropy_bound": 0.0}, "entropy_bound is 0.0"),
        ({"entropy_bound": float("nan")}, "entropy_bound is nan"),
        ({"confidence_threshold": float("inf")}, "confidence_threshold is inf"),
        ({"t_min": -0.1}, "t_min is -0.1"),
        ({"t_max": 0}, "t_max is 0"),
        ({"t_min": 0.9}, "t_max 0.8 is below t_min 0.9"),
        ({"eos_token_ids": (1, -5)}, "end-of-sequence token is -5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_out_of_range_is_named_with_a_hint(change: dict, named: str) -> None:
    with pytest.raises(CanvasError, match=named) as error:
        replace(SamplingParams(), **change).check_fits(CONFIG)
    assert error.value.hint


def test_unknown_parameters_are_named() -> None:
    with pytest.raises(CanvasError, match="'top_q'"):
        SamplingParams.from_defaults(SamplerDefaults(), CONFIG, top_q=0.9)


def test_the_limits_are_allowed() -> None:
    params = SamplingParams(seed=2**64 - 1, t_min=0.5, t_max=0.5, stability_threshold=0)
    params.check_fits(CONFIG)
    assert params.temperature_at(1) == params.temperature_at(48) == np.float32(0.5)


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 4.0])
def test_temperature_scales_the_schedule(factor: float) -> None:
    """For powers of two, scaling rounds nothing: it is the reference with both ends scaled."""
    scaled = SamplingParams(temperature=factor)
    ends = SamplingParams(t_min=factor * 0.4, t_max=factor * 0.8)
    for step in range(1, 49):
        assert scaled.temperature_at(step) == ends.temperature_at(step)
        assert scaled.temperature_at(step).dtype == np.float32


def test_temperature_1_is_the_checkpoint_s_and_0_its_limit() -> None:
    same, cold = SamplingParams(temperature=1.0), SamplingParams(temperature=0.0)
    for step in range(1, 49):
        assert same.temperature_at(step) == SamplingParams().temperature_at(step)
        assert cold.temperature_at(step) == np.float32(COLDEST)
    # Whatever logits a head with a softcap of 30 gives, apart by a float32's last bit or more.
    logits = np.array([3.0, np.nextafter(np.float32(3.0), np.float32(4)), -30.0], np.float32)
    shares = np.exp((logits - logits.max()) / cold.temperature_at(1))
    assert int(np.argmax(shares)) == 1
    gap = np.array([3.0, 3.001], np.float32)
    assert np.exp((gap - gap.max()) / cold.temperature_at(1))[0] == 0
    with pytest.raises(CanvasError, match="temperature is -1"):
        SamplingParams(temperature=-1)
