"""When a block ends, tested on chosen step results; other tests run whole generations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    StableAndConfidentStoppingCriteria,
)

from canvasrt.runtime.early_stop import EarlyStopping
from canvasrt.runtime.passes import DenoiseOutput
from canvasrt.runtime.request import Block, Event, Request
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.text_state import TextState

CONFIDENT, UNSURE = 0.001, 0.1


def blocks_of(tiny, params: SamplingParams, steps: Sequence[tuple[int, float]]) -> list[int]:
    """Return the steps per block if each step yields a canvas of one token, at one entropy."""
    active = TextState(0, Request([3], params), tiny.model, 0.0)
    events: list[Event] = []
    for token, entropy in steps:
        active.next_step()
        canvas = np.full(32, token)
        certain = np.full(32, entropy, np.float32)
        events += active.take(
            DenoiseOutput(canvas, canvas, certain, canvas > 0, np.zeros((32, 128), np.float32))
        )
    return [event.steps for event in events if isinstance(event, Block)]


def params(stability: int, blocks: int = 1, adaptive: bool = True) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=32 * blocks,
        max_denoising_steps=6,
        stability_threshold=stability,
        confidence_threshold=0.005,
        early_stop=adaptive,
    )


def test_stops_when_stable_and_confident(tiny) -> None:
    assert blocks_of(tiny, params(1), [(7, UNSURE), (7, CONFIDENT)]) == [2]
    assert blocks_of(tiny, params(2), [(7, CONFIDENT)] * 3) == [3]
    assert blocks_of(tiny, params(0), [(7, CONFIDENT)]) == [1]


def test_goes_on_while_one_is_missing(tiny) -> None:
    assert blocks_of(tiny, params(1), [(7, CONFIDENT), (8, CONFIDENT), (7, CONFIDENT)]) == []
    assert blocks_of(tiny, params(1), [(7, CONFIDENT), (7, UNSURE)]) == []
    assert blocks_of(tiny, params(2), [(7, CONFIDENT), (8, CONFIDENT), (8, CONFIDENT)]) == []


def test_the_threshold_itself_is_not_below_it(tiny) -> None:
    assert blocks_of(tiny, params(0), [(7, 0.005)]) == []


def test_a_new_block_forgets_the_last_ones_canvas(tiny) -> None:
    assert blocks_of(tiny, params(1, blocks=2), [(7, CONFIDENT)] * 4) == [2, 2]


def test_the_last_step_ends_a_block_in_any_case(tiny) -> None:
    assert blocks_of(tiny, params(1), [(token, UNSURE) for token in range(3, 9)]) == [6]
    assert blocks_of(tiny, params(1, adaptive=False), [(7, CONFIDENT)] * 6) == [6]


@pytest.mark.parametrize("stability", [0, 1, 2, 3])
def test_the_rule_is_that_of_transformers(stability: int) -> None:
    """Compare on random canvases that change occasionally, with logits between flat and peaked."""
    rng = np.random.default_rng(stability)
    theirs = StableAndConfidentStoppingCriteria(stability, 0.005)
    ours = EarlyStopping(params(stability))
    canvas, expected, found = np.zeros(32, np.int64), [], []
    for step in range(200):
        if step % 50 == 0:
            theirs.reset()
            ours.start_block()
        if rng.random() < 0.3:
            canvas = rng.integers(0, 2, 32)
        logits = torch.tensor(rng.normal(size=(1, 32, 9)) * rng.choice([1, 30, 3000]))
        entropy = torch.distributions.Categorical(logits=logits).entropy()[0].float().numpy()
        expected.append(bool(theirs(torch.tensor(canvas)[None], logits)))
        found.append(ours.stops(canvas, entropy))
    assert found == expected
    assert 0 < sum(found) < 200


def test_when_certain_the_first_step_without_entropy_is_enough() -> None:
    canvas, none = np.zeros(32, np.int64), np.zeros(32, np.float32)
    assert EarlyStopping(params(3), when_certain=True).stops(canvas, none)
    assert not EarlyStopping(params(3), when_certain=True).stops(canvas, none + np.float32(1e-6))
    assert not EarlyStopping(params(3)).stops(canvas, none)
    assert not EarlyStopping(params(3, adaptive=False), when_certain=True).stops(canvas, none)


@pytest.mark.parametrize("name", ["early_stop", "stability_threshold"])
def test_the_rule_stands_in_one_place(name: str) -> None:
    reading = {
        path.name
        for path in (Path(__file__).parents[2] / "runtime").rglob("*.py")
        if f"params.{name}" in path.read_text(encoding="utf-8")
    }
    assert reading == {"early_stop.py"}
