"""Scores of blocks compared with transformers, and redoing blocks with low scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.infill import infill_request
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.host_head import log_softmax
from canvasrt.runtime.model import Model
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.open import open_model
from canvasrt.runtime.prefix import PrefixCache
from canvasrt.runtime.request import Block, Draft, Finished, Request, Result
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.reference import PAD, Pair, Reference
from tests.helpers.restricted import cache_of, restricted_steps

CANVAS = 32
ALWAYS = -1e-4  # no block of the tiny model has so high a score


def params(pair: Pair, **overrides: object) -> SamplingParams:
    given = {"max_new_tokens": 3 * CANVAS, "max_denoising_steps": 6, "score_blocks": True}
    return SamplingParams.from_defaults(pair.model.sampler, pair.model.config, **given | overrides)


def device(pair: Pair) -> Model:
    return open_model(pair.graphs, check=False, backend=FakeBackend())


class Attempted(Reference):
    """The reference for one attempt at one block: generation by transformers with the noise of that attempt."""

    def __init__(self, other: Reference, block: int, attempt: int) -> None:
        super().__init__(other.model)
        self.at = block, attempt

    def _noise(self, seeds: list[int], block: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        index, attempt = self.at
        sizes = self.canvas, self.vocab
        rows = [step_noise(seed, index + block, step, *sizes, attempt) for seed in seeds]
        return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])


def causal_score(pair: Pair, context: list[int], tokens: list[int]) -> float:
    """Return the mean log-probability of tokens after a context by the encoder of transformers, in one pass."""
    model = pair.reference.model
    with torch.no_grad():
        hidden = model.model.encoder(input_ids=torch.tensor([context + tokens])).last_hidden_state[
            0, len(context) - 1 : -1
        ]
        cap = model.config.text_config.final_logit_softcapping
        logits = torch.tanh(model.lm_head(hidden).float() / cap) * cap
    return float(log_softmax(logits.numpy())[np.arange(len(tokens)), tokens].mean())


def denoised_score(pair: Pair, context: list[int], tokens: list[int], canvas: list[int]) -> float:
    """Return the mean log-probability of tokens at their positions of a canvas by the denoiser of transformers."""
    given, blank = params(pair), (np.zeros(CANVAS, np.float32), np.zeros(CANVAS, np.int64))
    cache = cache_of(pair.reference, context)
    step = restricted_steps(
        pair.reference, cache, len(context), canvas, {}, given, lambda step: blank, 1
    )[0]
    return float(log_softmax(step.logits)[np.arange(len(tokens)), tokens].mean())


def expected(pair: Pair, prompt: list[int], given: SamplingParams) -> tuple[list, list, list]:
    """Return tokens, and the score and steps of each block, generated block by block with transformers."""
    context, tokens, scores, steps = list(prompt), [], [], []
    for block in range(given.blocks(pair.model.config)):
        attempts = []
        for attempt in range(1 + (given.max_redos if given.redo_below < 0 else 0)):
            room = min(CANVAS, given.max_new_tokens - len(tokens))
            side = Attempted(pair.reference, block, attempt)
            out = side.generate([context], [replace(given, max_new_tokens=room)])
            new, last = out.tokens[0], out.trace.argmax[0][0][-1].tolist()
            if given.score_by_denoising:
                ended = new[-1] in given.eos_token_ids
                canvas = new + ([PAD] * (CANVAS - len(new)) if ended else last[len(new) :])
                score = denoised_score(pair, context, new, canvas)
            else:
                score = causal_score(pair, context, new)
            attempts.append((score, new, out.trace.steps(0)[0]))
            if given.redo_below == 0 or score >= given.redo_below:
                break
        else:
            attempts.sort(
                key=lambda each: -each[0]
            )  # stable: of equal scores, the first attempt wins
            attempts.append(attempts[0])
        score, new, _ = attempts[-1]
        scores.append(score)
        steps.append(sum(each[2] for each in attempts[: given.max_redos + 1]))
        tokens, context = tokens + new, context + new
        if new[-1] in given.eos_token_ids:
            break
    return tokens, scores, steps


def check(
    pair: Pair, prompt: list[int], given: SamplingParams, model: Model | None = None
) -> Result:
    (result,) = Generator(model or pair.model).run([Request(prompt, given)])
    tokens, scores, steps = expected(pair, prompt, given)
    assert result.token_ids == tokens
    assert result.steps == steps
    assert [each.score for each in result.block_scores] == pytest.approx(scores, abs=1e-4)
    return result


@pytest.mark.parametrize(("length", "by_denoising"), [(1, False), (150, False), (150, True)])
def test_scores_are_those_of_transformers(
    tiny: Pair, prompt: Callable[..., list[int]], length: int, by_denoising: bool
) -> None:
    """Prompts are shorter and longer than the sliding window. There are several blocks, and the budget cuts the
    last."""
    given = params(tiny, max_new_tokens=80, score_by_denoising=by_denoising)
    result = check(tiny, prompt(length), given)
    assert len(result.block_scores) == 3
    assert all(each.redone == 0 for each in result.block_scores)


@pytest.mark.parametrize("by_denoising", [False, True])
def test_an_answer_that_ends_is_scored_up_to_its_end(
    undertrained: Pair, by_denoising: bool
) -> None:
    ids = undertrained.tokenizer.encode_chat([{"role": "user", "content": "12+34="}])
    check(undertrained, ids, params(undertrained, score_by_denoising=by_denoising))


@pytest.mark.parametrize(("on_device", "by_denoising"), [(False, True), (True, False)])
def test_the_best_attempt_stands_when_none_is_good_enough(
    tiny: Pair, prompt: Callable[..., list[int]], on_device: bool, by_denoising: bool
) -> None:
    given = params(
        tiny,
        score_by_denoising=by_denoising,
        redo_below=ALWAYS,
        max_redos=2,
        max_new_tokens=2 * CANVAS,
        score_blocks=False,
    )
    chosen = set()
    for seed in range(2):
        result = check(
            tiny, prompt(40, seed), replace(given, seed=seed), device(tiny) if on_device else None
        )
        assert [each.redone for each in result.block_scores] == [2, 2]
        plain = Generator(tiny.model).run(
            [Request(prompt(40, seed), replace(given, seed=seed, redo_below=0.0))]
        )[0]
        chosen.add(plain.token_ids[:CANVAS] == result.token_ids[:CANVAS])
    assert False in chosen  # the first attempt was not always the best


def test_the_first_attempt_that_is_good_enough_stands(
    tiny: Pair, prompt: Callable[..., list[int]]
) -> None:
    given = params(tiny)
    scores = []
    for seed in range(2):
        request = Request(prompt(40, seed), replace(given, seed=seed))
        scores += [each.score for each in Generator(tiny.model).run([request])[0].block_scores]
    middle = float(np.float32(np.median(scores)))
    redone = []
    for seed in range(2):
        ours = replace(given, seed=seed, redo_below=middle, max_redos=4)
        result = check(tiny, prompt(40, seed), ours)
        redone += [each.redone for each in result.block_scores]
    assert 0 in redone
    assert any(0 < each < 4 for each in redone)


@pytest.mark.parametrize(("by_denoising", "cached"), [(False, 512), (True, 600)])
def test_the_prefix_cache_spares_what_scores_need(
    tiny: Pair, prompt: Callable[..., list[int]], by_denoising: bool, cached: int
) -> None:
    """The causal score needs the output of the prompt's last token, which is not cached, so its chunk is encoded
    again."""
    wanted = Request(prompt(600, 7), params(tiny, score_by_denoising=by_denoising))
    generator = Generator(tiny.model, prefixes=PrefixCache(tiny.model, 2**28))
    first, again = (generator.run([wanted])[0] for _ in range(2))
    assert (first.token_ids, first.block_scores) == (again.token_ids, again.block_scores)
    assert again.cached_tokens == cached


def test_nothing_is_sent_before_its_block_stands(
    tiny: Pair, prompt: Callable[..., list[int]]
) -> None:
    given = params(tiny, redo_below=ALWAYS, max_redos=2)
    events = list(Generator(tiny.model).stream(Request(prompt(40), given)))
    finished = events[-1]
    assert isinstance(finished, Finished)
    blocks = [each for each in events if isinstance(each, Block)]
    assert [each.block for each in blocks] == [0, 1, 2]
    assert [token for each in blocks for token in each.tokens] == finished.result.token_ids
    assert [each.score for each in blocks] == finished.result.block_scores
    begin = 0
    for index, event in enumerate(events[:-1]):
        if isinstance(event, Block):
            drafts = events[begin:index]
            assert all(isinstance(each, Draft) for each in drafts)
            assert [each.step for each in drafts].count(1) == 3
            assert len(drafts) == event.steps
            begin = index + 1


def test_what_cannot_be_scored_is_refused(tiny: Pair, undertrained: Pair) -> None:
    filled = infill_request(
        "a{2}", [5], params(undertrained), undertrained.model, undertrained.tokenizer
    )
    with pytest.raises(CanvasError, match="score_blocks is not supported together with gaps"):
        Generator(undertrained.model).add(filled)
    given = params(tiny, redo_below=-1.0, max_redos=3)
    given.check_limits(tiny.model.config, 1, None, 3 * 6 * 4)
    with pytest.raises(CanvasError, match="may take 72 denoising passes"):
        given.check_limits(tiny.model.config, 1, None, 71)
