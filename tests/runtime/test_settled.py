"""Text that is final before its block: the sampler guarantees none, `settle_steps` does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from canvasrt.errors import CanvasError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.passes import DenoiseOutput
from canvasrt.runtime.request import Block, Draft, Event, Finished, Request, Result, Settled
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.text_state import TextState

CALM, UNSURE = 0.001, 0.1
EOS = 1
QUESTIONS = ("shuffle abdeghkl", "sort 40172589", "reverse planetary", "88+97=")


def events_of(side, seed: int, settle_steps: int) -> list[Event]:
    """Return the events of one generation of a real model."""
    params = SamplingParams.from_defaults(
        side.model.sampler, side.model.config, seed=seed, settle_steps=settle_steps
    )
    question = QUESTIONS[seed % len(QUESTIONS)]
    prompt = side.tokenizer.encode_chat([{"role": "user", "content": question}])
    return list(Generator(side.model).stream(Request(prompt, params)))


def result_of(events: Sequence[Event]) -> Result:
    assert isinstance(events[-1], Finished)
    return events[-1].result


def test_an_accepted_token_may_change_so_the_sampler_alone_settles_nothing(demo) -> None:
    changed = 0
    for seed in range(8):
        drafts = [each for each in events_of(demo, seed, 0) if isinstance(each, Draft)]
        for before, after in pairwise(drafts):
            if before.block == after.block:
                changed += int((before.accepted & (before.tokens != after.tokens)).sum())
    assert changed > 0


def test_what_was_sent_never_changes_and_joins_to_the_answer(demo) -> None:
    early, settle_steps = 0, 1
    for seed in range(8):
        sent: list[int] = []
        blocks: dict[int, list[int]] = {}
        events = events_of(demo, seed, settle_steps)
        for event in events:
            if isinstance(event, Settled):
                sent += event.tokens
                blocks.setdefault(event.block, []).extend(event.tokens)
                early += len(event.tokens)
            elif isinstance(event, Draft):
                already = blocks.get(event.block, [])
                assert event.tokens[: len(already)].tolist() == already
                assert event.settled >= len(already)
            elif isinstance(event, Block):
                already = blocks.get(event.block, [])
                assert event.settled == len(already)
                assert event.tokens[: event.settled] == already
                sent += event.tokens[event.settled :]
        assert sent == result_of(events).token_ids
    assert early > 0


def test_without_the_rule_a_block_is_sent_whole(demo) -> None:
    events = events_of(demo, 0, 0)
    assert not any(isinstance(event, Settled) for event in events)
    assert all(event.settled == 0 for event in events if isinstance(event, Block | Draft))


def feed(tiny, steps: Sequence[tuple[list[int], list[float]]], **options) -> list[Event]:
    """Return the events of a request whose steps yield these first tokens, at these entropies."""
    params = SamplingParams(max_denoising_steps=20, eos_token_ids=(EOS,), **options)
    active = TextState(0, Request([3], params), tiny.model, 0.0)
    events: list[Event] = []
    for tokens, entropies in steps:
        if active.finished:
            break
        active.next_step()
        canvas, entropy = np.full(32, 9), np.full(32, UNSURE, np.float32)
        canvas[: len(tokens)], entropy[: len(entropies)] = tokens, entropies
        hidden = np.zeros((32, 128), np.float32)
        events += active.take(DenoiseOutput(canvas, canvas, entropy, canvas > 0, hidden))
    return events


def settled(events: Sequence[Event]) -> list[tuple[int, list[int]]]:
    return [(event.step, event.tokens) for event in events if isinstance(event, Settled)]


def test_a_position_waits_for_all_before_it(tiny) -> None:
    steps = [([5, 6, 7], [CALM, UNSURE, CALM])] * 2 + [([5, 6, 7], [CALM, CALM, CALM])] * 2
    assert settled(feed(tiny, steps, settle_steps=1)) == [(2, [5]), (3, [6, 7])]


def test_a_change_or_doubt_starts_the_count_again(tiny) -> None:
    steps = [([token], [CALM]) for token in (5, 5, 6, 6, 6)]
    assert settled(feed(tiny, steps, settle_steps=2)) == [(5, [6])]
    doubt = [([5], [entropy]) for entropy in (CALM, CALM, UNSURE, CALM, CALM)]
    assert settled(feed(tiny, doubt, settle_steps=2)) == [(5, [5])]


def test_a_settled_token_stays_when_the_model_changes_its_mind(tiny) -> None:
    steps = [([5, 6], [CALM, UNSURE])] * 2 + [([8, 6], [CALM, CALM])] * 18
    events = feed(tiny, steps, settle_steps=1, max_new_tokens=2)
    assert settled(events) == [(2, [5])]
    assert result_of(events).token_ids == [5, 6]


def test_a_block_ends_once_the_end_of_the_sequence_has_settled(tiny) -> None:
    events = feed(tiny, [([5, EOS], [CALM, CALM])] * 9, settle_steps=2)
    result = result_of(events)
    assert (result.token_ids, result.finish_reason, result.steps) == ([5, EOS], "stop", [3])


def test_it_ends_blocks_early_so_it_does_not_go_with_all_steps() -> None:
    with pytest.raises(CanvasError, match="early stopping is off"):
        SamplingParams(settle_steps=1, early_stop=False)
