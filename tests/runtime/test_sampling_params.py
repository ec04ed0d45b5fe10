"""Sampling parameters: defaults, limits, and the temperature schedule of the reference."""

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


def test_defaults_are_the_checkpoints_and_overrides_win() -> None:
    defaults = SamplerDefaults(max_denoising_steps=7, entropy_bound=0.3, max_new_tokens=40)
    params = SamplingParams.from_defaults(defaults, CONFIG)
    assert (params.max_denoising_steps, params.entropy_bound, params.max_new_tokens) == (7, 0.3, 40)
    assert (params.eos_token_ids, params.seed) == ((1, 106, 50), 0)
    params = SamplingParams.from_defaults(
        SamplerDefaults(), CONFIG, seed=4, t_min=None, max_new_tokens=5, eos_token_ids=3
    )
    assert (params.seed, params.t_min, params.max_new_tokens) == (4, 0.4, 5)
    assert params.eos_token_ids == (3,)
    with pytest.raises(CanvasError, match="'top_q'"):
        SamplingParams.from_defaults(SamplerDefaults(), CONFIG, top_q=0.9)


@pytest.mark.parametrize(
    ("t_min", "t_max", "steps"), [(0.4, 0.8, 48), (0.0, 1.7, 7), (0.1, 0.3, 1), (0.5, 0.5, 3)]
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
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": -0.1}, "top_p is -0.1"),
        ({"min_p": 2}, "min_p is 2"),
        ({"top_k": -2}, "top_k is -2"),
        ({"logit_bias": ((5, 101.0),)}, "logit_bias of token 5 is 101.0"),
        ({"logit_bias": ((5, 1.0), (7, 1.0), (5, 1.0))}, "logit_bias of token 5 is given twice"),
        ({"logit_bias": ((512, 1.0),)}, "logit_bias names token 512"),
        ({"redo_below": 1.0}, "redo_below is 1"),
        ({"max_redos": 17}, "max_redos is 17"),
        ({"settle_steps": 1, "redo_below": -2.0}, "settle_steps is 1 and redo_below is -2"),
        ({"settle_steps": 1, "early_stop": False}, "early stopping is off"),
        ({"top_logprobs": 3}, "top_logprobs is 3 without logprobs"),
        ({"logprob_token_ids": (3,)}, "logprob_token_ids is .* without logprobs"),
        ({"canvas_length": -2}, "canvas_length is -2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_out_of_range_is_named_with_a_hint(change: dict, named: str) -> None:
    with pytest.raises(CanvasError, match=named) as error:
        replace(SamplingParams(), **change).check_fits(CONFIG)
    assert error.value.hint


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 4.0])
def test_temperature_scales_the_schedule(factor: float) -> None:
    """The scaled schedule equals the reference's with both ends scaled. Factors are powers of two, so scaling is
    exact."""
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
    # Logits of a head with a softcap of 30. Two of them differ only in the last bit of float32.
    logits = np.array([3.0, np.nextafter(np.float32(3.0), np.float32(4)), -30.0], np.float32)
    shares = np.exp((logits - logits.max()) / cold.temperature_at(1))
    assert int(np.argmax(shares)) == 1
    gap = np.array([3.0, 3.001], np.float32)
    assert np.exp((gap - gap.max()) / cold.temperature_at(1))[0] == 0
