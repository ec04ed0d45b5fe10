"""`top_p`, `top_k`, `min_p` and `logit_bias`: generations equal those of transformers with its warpers, and a step
equals one that draws every token on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from canvasrt.runtime.host_head import HostHead
from canvasrt.runtime.host_sampler import biased, candidates, host_step, redrawn
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.reference import Pair, warpers_of

# The high bound accepts uncertain tokens, so that candidates matter.
BASE = SamplingParams(
    max_new_tokens=64,
    max_denoising_steps=11,
    entropy_bound=20.0,
    t_max=1.5,
    confidence_threshold=1.0,
)
RESTRICTED = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
]
Prompt = Callable[..., list[int]]


def seeds(base: SamplingParams, count: int) -> list[SamplingParams]:
    return [replace(base, seed=7 + i) for i in range(count)]


@pytest.mark.parametrize(
    "change",
    [{"top_k": 3, "entropy_bound": 0.5}, {"top_p": 0.9}, {"min_p": 0.2}, RESTRICTED[-1]],
    ids=str,
)
def test_generations_equal_transformers(tiny: Pair, prompt: Prompt, change: dict) -> None:
    params = seeds(replace(BASE, **change), 3)
    prompts = [prompt(30, seed) for seed in range(3)]
    expected = tiny.reference.generate(prompts, params)
    expected.check(tiny.generate(prompts, params))


@pytest.mark.parametrize("change", RESTRICTED, ids=str)
def test_candidates_are_those_of_the_warpers(change: dict) -> None:
    params = SamplingParams(**change)
    logits = np.random.default_rng(0).normal(0, 3, (200, 300)).astype(np.float32)
    left = warpers_of(params)(None, torch.from_numpy(logits))
    assert (candidates(logits, params) == np.isfinite(left.numpy())).all()


def test_a_step_is_the_one_that_draws_every_token_anew(tiny: Pair) -> None:
    """Restricting candidates may change even a draw of the likeliest token, since the shares of all candidates grow."""
    head, config, random = tiny.model.host_head, tiny.model.config, np.random.default_rng(0)
    params = SamplingParams(
        top_k=3, entropy_bound=1e6, max_denoising_steps=30, t_min=0.05, t_max=0.6
    )
    shifted = 0
    for step in range(1, 31):
        hidden = random.normal(0, 2, (config.canvas_length, config.hidden_size)).astype(np.float32)
        uniforms, noise = step_noise(0, 0, step, config.canvas_length, config.vocab_size)
        free, wanted = (
            host_step(head, hidden, {}, each, step, uniforms, noise)
            for each in (replace(params, top_k=0), params)
        )
        found, places, states = redrawn(head, free, params, params.temperature_at(step), uniforms)
        assert (found.canvas == wanted.canvas).all()
        assert np.allclose(states, wanted.next_hidden[places], atol=1e-5)
        shifted += int(((free.canvas == free.argmax) & (wanted.canvas != free.argmax)).sum())
    assert shifted


def test_few_places_are_scored(tiny: Pair, prompt: Prompt, monkeypatch) -> None:
    """The host computes logits of a position only if its draw may depend on the candidates."""
    scored = []
    logits = HostHead.logits
    monkeypatch.setattr(
        HostHead, "logits", lambda self, h, *rest: scored.append(len(h)) or logits(self, h, *rest)
    )
    params = replace(BASE, entropy_bound=0.1, t_max=0.8, max_denoising_steps=48, top_p=0.9)
    (result,) = tiny.generate([prompt(30)], [params])
    assert sum(scored) < 2 * sum(result.steps)
    assert result.logprobs == []
    scored.clear()
    tiny.generate([prompt(30)], [replace(params, top_p=1.0, top_k=-1)])
    assert not scored


@pytest.mark.parametrize("bias", [((9, 100.0),), ((3, -100.0), (17, 4.5), (411, 7.25))], ids=str)
def test_a_bias_is_added_before_the_temperature(tiny: Pair, prompt: Prompt, bias: tuple) -> None:
    params = seeds(replace(BASE, logit_bias=bias, entropy_bound=1.0, top_k=50), 3)
    prompts = [prompt(30, seed) for seed in range(3)]
    expected = tiny.reference.generate(prompts, params)
    expected.check(tiny.generate(prompts, params))
    free = tiny.generate(prompts, seeds(replace(BASE, entropy_bound=1.0, top_k=50), 3))
    assert [each.token_ids for each in free] != expected.tokens


def test_a_bias_of_some_tokens_only_reaches_those_that_are_scored() -> None:
    params = SamplingParams(logit_bias=((2, 5.0), (7, -1.0), (9, 3.0)))
    all_of_them = biased(np.zeros((2, 12), np.float32), params)
    tokens = np.array([0, 2, 9, 11])
    some = biased(np.zeros((2, 4), np.float32), params, tokens)
    assert (some == all_of_them[:, tokens]).all()
    assert some[0].tolist() == [0, 5, 3, 0]
