"""When a block ends and when tokens settle before their block, for chosen step results and for a real model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    StableAndConfidentStoppingCriteria,
)

from canvasrt.runtime.early_stop import EarlyStopping
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.passes import DenoiseOutput
from canvasrt.runtime.request import Block, Draft, Event, Finished, Request, Settled
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.text_state import TextState
from tests.helpers.reference import Pair

CALM, UNSURE = 0.001, 0.1
EOS = 1
# Tokens and entropies of a step: lists for the first positions of the canvas, or numbers for all positions.
Step = tuple[list[int] | int, list[float] | float]


def feed(pair: Pair, steps: Sequence[Step], **options: Any) -> list[Event]:
    """Return the events of a request whose steps have these results."""
    given = {"max_denoising_steps": 20, "eos_token_ids": (EOS,), **options}
    active = TextState(0, Request([3], SamplingParams(**given)), pair.model, 0.0)
    events: list[Event] = []
    for tokens, entropies in steps:
        if active.finished:
            break
        active.next_step()
        canvas, entropy = np.full(32, 9), np.full(32, UNSURE, np.float32)
        here = slice(len(tokens)) if isinstance(tokens, list) else slice(None)
        canvas[here], entropy[here] = tokens, entropies
        hidden = np.zeros((32, 128), np.float32)
        events += active.take(DenoiseOutput(canvas, canvas, entropy, canvas > 0, hidden))
    return events


@pytest.mark.parametrize(
    ("options", "steps", "blocks"),
    [
        ({"stability_threshold": 1}, [(7, UNSURE), (7, CALM)], [2]),
        ({"stability_threshold": 2}, [(7, CALM)] * 3, [3]),
        ({"stability_threshold": 0}, [(7, CALM)], [1]),
        ({"stability_threshold": 1}, [(7, CALM), (8, CALM), (7, CALM)], []),
        ({"stability_threshold": 1}, [(7, CALM), (7, UNSURE)], []),
        # The entropy must be below the threshold, not equal.
        ({"stability_threshold": 0, "confidence_threshold": 0.005}, [(7, 0.005)], []),
        # A new block does not remember the previous block's canvas.
        ({"stability_threshold": 1, "max_new_tokens": 64}, [(7, CALM)] * 4, [2, 2]),
        # The last step always ends a block.
        ({"max_denoising_steps": 6}, [(token, UNSURE) for token in range(3, 9)], [6]),
        ({"max_denoising_steps": 6, "early_stop": False}, [(7, CALM)] * 6, [6]),
    ],
)
def test_when_a_block_ends(
    tiny: Pair, options: dict[str, Any], steps: list[Step], blocks: list[int]
) -> None:
    events = feed(tiny, steps, **{"max_new_tokens": 32, **options})
    assert [event.steps for event in events if isinstance(event, Block)] == blocks


def params(stability: int, adaptive: bool = True) -> SamplingParams:
    return SamplingParams(
        stability_threshold=stability, confidence_threshold=0.005, early_stop=adaptive
    )


@pytest.mark.parametrize("stability", [0, 1, 2, 3])
def test_the_rule_is_that_of_transformers(stability: int) -> None:
    """Compares with transformers on random canvases that change occasionally, with flat to peaked logits."""
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


@pytest.mark.parametrize(
    ("settle_steps", "steps", "settled", "tokens"),
    [
        # A position waits for all earlier positions.
        (
            1,
            [([5, 6, 7], [CALM, UNSURE, CALM])] * 2 + [([5, 6, 7], [CALM] * 3)] * 2,
            [(2, [5]), (3, [6, 7])],
            None,
        ),
        # A changed token or a high entropy restarts the count.
        (2, [([token], [CALM]) for token in (5, 5, 6, 6, 6)], [(5, [6])], None),
        (2, [([5], [each]) for each in (CALM, CALM, UNSURE, CALM, CALM)], [(5, [5])], None),
        # A settled token stays, even if the model later prefers another.
        (
            1,
            [([5, 6], [CALM, UNSURE])] * 2 + [([8, 6], [CALM, CALM])] * 18,
            [(2, [5])],
            [5, 6],
        ),
        # A block ends when the end of the sequence has settled.
        (2, [([5, EOS], [CALM, CALM])] * 9, [], [5, EOS]),
        (0, [([5, 6], [CALM, CALM])] * 9, [], None),
    ],
)
def test_when_tokens_settle(
    tiny: Pair,
    settle_steps: int,
    steps: list[Step],
    settled: list[tuple[int, list[int]]],
    tokens: list[int] | None,
) -> None:
    budget = {"max_new_tokens": 2} if tokens else {}
    events = feed(tiny, steps, settle_steps=settle_steps, **budget)
    assert [(each.step, each.tokens) for each in events if isinstance(each, Settled)] == settled
    if tokens:
        assert isinstance(events[-1], Finished)
        assert events[-1].result.token_ids == tokens
        assert events[-1].result.steps == [3]


def test_what_was_sent_never_changes_and_joins_to_the_answer(demo: Pair) -> None:
    early = 0
    for seed, question in enumerate(("shuffle abdeghkl", "sort 40172589", "reverse planetary")):
        given = SamplingParams.from_defaults(
            demo.model.sampler, demo.model.config, seed=seed, settle_steps=1
        )
        ids = demo.tokenizer.encode_chat([{"role": "user", "content": question}])
        sent: list[int] = []
        blocks: dict[int, list[int]] = {}
        for event in Generator(demo.model).stream(Request(ids, given)):
            if isinstance(event, Finished):
                assert sent == event.result.token_ids
                continue
            already = blocks.setdefault(event.block, [])
            if isinstance(event, Settled):
                sent += event.tokens
                already += event.tokens
                early += len(event.tokens)
            elif isinstance(event, Draft):
                assert event.tokens[: len(already)].tolist() == already
                assert event.settled >= len(already)
            else:
                assert event.settled == len(already)
                assert event.tokens[: event.settled] == already
                sent += event.tokens[event.settled :]
    assert early > 0
