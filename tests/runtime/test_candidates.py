"""`top_p`, `top_k`, `min_p` and `logit_bias`: whole generations equal those of transformers with its own
warpers, and a step equals one that draws every token on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from canvasrt.errors import CanvasError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.host_head import HostHead
from canvasrt.runtime.host_sampler import biased, candidates, host_step, redrawn
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Draft, Request
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.reference import Pair, warpers_of

# Uncertain tokens are accepted, so that candidates matter.
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


def test_rows_have_their_own_and_a_device_agrees(tiny: Pair, prompt: Prompt) -> None:
    """One batch mixes restricted requests and others; each gives the tokens that it gives alone, also on a device."""
    changes = [{}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}, {"logit_bias": ((5, -100.0),)}]
    params = [replace(BASE, seed=3, **change) for change in changes]
    together = tiny.generate([prompt(20)] * len(params), params, max_batch=len(params))
    for given, result in zip(params, together, strict=True):
        assert tiny.generate([prompt(20)], [given])[0].token_ids == result.token_ids
    assert len({tuple(each.token_ids) for each in together}) > 3
    device = open_model(tiny.graphs, check=False, backend=FakeBackend())
    theirs = Generator(device).run([Request(prompt(20), each) for each in params])
    assert [each.token_ids for each in theirs] == [each.token_ids for each in together]


def test_only_candidates_are_drawn_and_acceptance_is_untouched(tiny: Pair, prompt: Prompt) -> None:
    """With one candidate every accepted token is the argmax, and the first step accepts as in a
    free draw: a restriction changes no entropy."""

    def first(params: SamplingParams) -> Draft:
        events = Generator(tiny.model).stream(Request(prompt(25), params))
        draft = next(events)
        assert isinstance(draft, Draft)
        return draft

    free, one = first(BASE), first(replace(BASE, top_k=1))
    assert (free.accepted == one.accepted).all()
    assert (one.canvas[one.accepted] == one.tokens[one.accepted]).all()
    assert (free.canvas[free.accepted] != free.tokens[free.accepted]).any()
    assert (free.canvas[~free.accepted] == one.canvas[~one.accepted]).all()


@pytest.mark.parametrize("change", RESTRICTED, ids=str)
def test_candidates_are_those_of_the_warpers(change: dict) -> None:
    params = SamplingParams(**change)
    logits = np.random.default_rng(0).normal(0, 3, (200, 300)).astype(np.float32)
    left = warpers_of(params)(None, torch.from_numpy(logits))
    assert (candidates(logits, params) == np.isfinite(left.numpy())).all()


@pytest.mark.parametrize("change", [RESTRICTED[1], RESTRICTED[3], RESTRICTED[-1]], ids=str)
def test_a_step_is_the_one_that_draws_every_token_anew(tiny: Pair, change: dict) -> None:
    """Many steps, most of whose draws are uncertain, give the same canvas and hidden states."""
    head, config, random = tiny.model.host_head, tiny.model.config, np.random.default_rng(0)
    changed = shifted = 0
    for step in range(1, 31):
        hidden = random.normal(0, 1, (config.canvas_length, config.hidden_size))
        hidden = (hidden * random.uniform(0.1, 4)).astype(np.float32)
        uniforms = random.random(config.canvas_length, np.float32)
        noise = random.integers(0, config.vocab_size, config.canvas_length)
        free = SamplingParams(entropy_bound=1e6, max_denoising_steps=30, t_min=0.05, t_max=0.6)
        params = replace(free, **change)
        before = host_step(head, hidden, {}, free, step, uniforms, noise)
        wanted = host_step(head, hidden, {}, params, step, uniforms, noise)
        temperature = params.temperature_at(step)
        found, places, states = redrawn(head, before, params, temperature, uniforms)
        assert (found.canvas == wanted.canvas).all()
        assert np.allclose(states, wanted.next_hidden[places], atol=1e-5)
        rest = np.setdiff1d(np.arange(config.canvas_length), places)
        assert (before.next_hidden[rest] == wanted.next_hidden[rest]).all()
        changed += len(places)
        shifted += int(((before.canvas == before.argmax) & (wanted.canvas != before.argmax)).sum())
    assert changed > 30
    # A draw of the likeliest token can become another one, since other tokens' shares grow.
    assert shifted > 0 or change != {"top_k": 3}


def test_few_places_are_scored(tiny: Pair, prompt: Prompt, monkeypatch) -> None:
    """The host scores a place only if its draw may depend on the candidates."""
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


def test_a_banned_token_never_stands_and_a_forced_one_always(tiny: Pair, prompt: Prompt) -> None:
    (free,) = tiny.generate([prompt(30)], [BASE])
    banned = max(set(free.token_ids), key=free.token_ids.count)
    (without,) = tiny.generate([prompt(30)], [replace(BASE, logit_bias=((banned, -100.0),))])
    assert banned not in without.token_ids
    (only,) = tiny.generate([prompt(30)], [replace(BASE, logit_bias=((banned, 100.0),))])
    assert set(only.token_ids) == {banned}


def test_a_bias_of_some_tokens_only_reaches_those_that_are_scored() -> None:
    params = SamplingParams(logit_bias=((2, 5.0), (7, -1.0), (9, 3.0)))
    all_of_them = biased(np.zeros((2, 12), np.float32), params)
    tokens = np.array([0, 2, 9, 11])
    some = biased(np.zeros((2, 4), np.float32), params, tokens)
    assert (some == all_of_them[:, tokens]).all()
    assert some[0].tolist() == [0, 5, 3, 0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": -0.1}, "top_p is -0.1"),
        ({"min_p": 2}, "min_p is 2"),
        ({"top_k": -2}, "top_k is -2"),
        ({"logit_bias": ((5, 101.0),)}, "logit_bias of token 5 is 101.0"),
        ({"logit_bias": ((512, 1.0),)}, "logit_bias names token 512"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_named(
    tiny: Pair, prompt: Prompt, change: dict, named: str
) -> None:
    with pytest.raises(CanvasError, match=named) as error:
        tiny.generate([prompt(5)], [replace(BASE, **change)])
    assert error.value.hint
