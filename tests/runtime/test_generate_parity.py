"""With the same noise, whole generations equal the `generate` of transformers, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from canvasrt.runtime.request import Result
from canvasrt.runtime.sampling_params import SamplingParams

# Settings under which the tiny model stops early in some blocks and not in others.
BASE = SamplingParams(
    max_new_tokens=96,
    max_denoising_steps=11,
    entropy_bound=1.0,
    confidence_threshold=1.0,
)
WINDOW = 64
DEMO_PROMPTS = ["17+25=", "reverse abcdef", "count 7 to 31", "brackets 8"]
Prompt = Callable[..., list[int]]


def check(tiny, prompts: list[list[int]], params: list[SamplingParams]) -> list[Result]:
    """Run both sides and compare tokens and steps; return canvasrt's results."""
    expected = tiny.reference.generate(prompts, params)
    results = tiny.generate(prompts, params)
    expected.check(results)
    return results


def seeds(base: SamplingParams, count: int, first: int = 0) -> list[SamplingParams]:
    return [replace(base, seed=first + i) for i in range(count)]


def common_token(results: list[Result]) -> int:
    """Return a token that occurs inside a block of most results. Tests use it as the end of sequence."""
    canvas = 32
    counts: dict[int, int] = {}
    for result in results:
        inner = {t for i, t in enumerate(result.token_ids) if 4 < i % canvas < canvas - 4}
        for token in inner:
            counts[token] = counts.get(token, 0) + 1
    return max(counts, key=lambda token: (counts[token], token))


@pytest.mark.parametrize(
    ("length", "adaptive", "batch"),
    [
        (1, True, 4),
        (40, False, 4),
        (WINDOW - 1, False, 1),
        (WINDOW, True, 1),
        (WINDOW + 1, True, 4),
        (150, True, 4),
    ],
)
def test_several_blocks(tiny, prompt: Prompt, length: int, adaptive: bool, batch: int) -> None:
    base = replace(BASE, early_stop=adaptive, max_new_tokens=96 if length < 100 else 64)
    prompts = [prompt(length, seed) for seed in range(batch)]
    results = check(tiny, prompts, seeds(base, batch, first=1000 + length))
    assert {result.finish_reason for result in results} == {"length"}
    if not adaptive:
        assert all(steps == 11 for result in results for steps in result.steps)


def test_end_of_sequence_inside_a_block(tiny, prompt: Prompt) -> None:
    base = replace(BASE, max_new_tokens=160)
    prompts = [prompt(20, seed) for seed in range(4)]
    params = seeds(base, 4, first=300)
    # Ends of sequence must be tokens that occur: random weights would hardly ever generate token 1.
    free = tiny.generate(prompts, params)
    ends = (1, common_token(free), free[0].token_ids[45])
    results = check(tiny, prompts, [replace(each, eos_token_ids=ends) for each in params])
    stopped = [result for result in results if result.finish_reason == "stop"]
    assert stopped
    for result in stopped:
        assert result.token_ids[-1] in ends
        assert not set(result.token_ids[:-1]) & set(ends)
        assert len(result.steps) == -(-len(result.token_ids) // 32)
    assert any(len(result.token_ids) % 32 for result in stopped)


@pytest.mark.parametrize(
    "change",
    [
        {"entropy_bound": 20.0},
        {"t_min": 0.0, "t_max": 2.0},
        {"max_denoising_steps": 1},
        {"stability_threshold": 3, "max_denoising_steps": 20},
        {"stability_threshold": 0, "confidence_threshold": 0.5, "max_denoising_steps": 20},
        {"stability_threshold": 0, "confidence_threshold": 0.05, "max_denoising_steps": 20},
    ],
    ids=str,
)
def test_other_settings(tiny, prompt: Prompt, change: dict) -> None:
    check(tiny, [prompt(25, s) for s in range(2)], seeds(replace(BASE, **change), 2, first=9))


@pytest.mark.parametrize("budget", [1, 33])
def test_a_budget_that_is_not_whole_blocks(tiny, prompt: Prompt, budget: int) -> None:
    result = check(tiny, [prompt(12)], [replace(BASE, max_new_tokens=budget)])[0]
    assert len(result.token_ids) == budget
    assert len(result.steps) == -(-budget // 32)


@pytest.mark.parametrize("chunk", [16, 100])
def test_prefill_in_chunks(tiny, prompt: Prompt, monkeypatch, chunk: int) -> None:
    whole = check(tiny, [prompt(150)], [replace(BASE, max_new_tokens=64)])[0]
    monkeypatch.setattr(tiny.model, "prefill_chunk", chunk)
    passes = tiny.model.counters.encode_passes
    parts = tiny.generate([prompt(150)], [replace(BASE, max_new_tokens=64)])[0]
    assert parts.token_ids == whole.token_ids
    # Chunks of the prompt and of the first block. The last block is never encoded.
    assert tiny.model.counters.encode_passes - passes == -(-150 // chunk) + -(-32 // chunk)


def test_prompts_of_the_demo_checkpoint(demo) -> None:
    """A trained model with its default settings generates several blocks and ends the sequence itself."""
    results = []
    for index, text in enumerate(DEMO_PROMPTS):
        prompt = demo.tokenizer.encode_chat([{"role": "user", "content": text}])
        params = SamplingParams.from_defaults(
            demo.model.sampler, demo.model.config, seed=index, max_new_tokens=96
        )
        results += check(demo, [prompt], [params])
    assert all(result.finish_reason == "stop" for result in results)
    assert max(len(result.steps) for result in results) > 1


def test_an_undertrained_checkpoint(undertrained) -> None:
    """An unsure model takes many steps and accepts only some tokens in each."""
    text = "count 7 to 31"
    prompt = undertrained.tokenizer.encode_chat([{"role": "user", "content": text}])
    base = SamplingParams.from_defaults(
        undertrained.model.sampler,
        undertrained.model.config,
        max_new_tokens=64,
        max_denoising_steps=16,
    )
    results = check(undertrained, [prompt] * 4, seeds(base, 4))
    assert len({steps for result in results for steps in result.steps}) > 1


def test_these_tests_are_not_vacuous(tiny, prompt: Prompt) -> None:
    """The tiny model changes tokens between steps, accepts only some, and stops early in some blocks."""
    out = tiny.reference.generate([prompt(40, s) for s in range(4)], seeds(BASE, 4))
    steps = [count for row in range(4) for count in out.trace.steps(row)]
    assert len(set(steps)) >= 3
    assert min(steps) < BASE.max_denoising_steps == max(steps)
    accepted = [mask.sum() for row in out.trace.accepted for block in row for mask in block]
    assert len(set(accepted)) >= 10
    assert min(accepted) < 16
    assert max(accepted) == 32
    for block in out.trace.argmax[0]:
        assert (block[0] != block[-1]).sum() >= 5, "one step would do"
    flat = np.concatenate([np.array(row) for row in out.tokens])
    assert len(set(flat.tolist())) > 50
