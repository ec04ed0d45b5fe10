"""The log-probability of a final token, taken at the step that settled it, equals that of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from canvasrt.errors import CanvasError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.host_head import TokenScore, log_softmax
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.open import open_model
from canvasrt.runtime.prefix import PrefixCache
from canvasrt.runtime.request import Block, Request, Settled
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.reference import Pair
from tests.helpers.resident import body_profiles
from tests.helpers.restricted import cache_of, restricted_steps


def params(pair: Pair, **options: object) -> SamplingParams:
    given = {"logprobs": True, "top_logprobs": 5, "max_denoising_steps": 6, "max_new_tokens": 32}
    return SamplingParams.from_defaults(
        pair.model.sampler, pair.model.config, seed=3, **{**given, **options}
    )


def reference_steps(pair: Pair, ids: list[int], given: SamplingParams) -> list[np.ndarray]:
    """Return the log-probabilities `[canvas, V]` of each step of the first block."""

    def noise(step: int) -> tuple[np.ndarray, np.ndarray]:
        return step_noise(
            given.seed, 0, step, pair.model.config.canvas_length, pair.reference.vocab
        )

    count = given.max_denoising_steps
    cache, first = cache_of(pair.reference, ids), noise(0)[1].tolist()
    done = restricted_steps(pair.reference, cache, len(ids), first, {}, given, noise, count)
    return [log_softmax(step.logits) for step in done]


@pytest.mark.parametrize("settle_steps", [0, 1])
def test_every_token_has_the_score_of_the_step_that_settled_it(
    tiny: Pair, prompt: Callable[..., list[int]], settle_steps: int
) -> None:
    given = params(
        tiny,
        settle_steps=settle_steps,
        confidence_threshold=0.4 if settle_steps else 0.005,
        early_stop=bool(settle_steps),
    )
    ids = prompt(40)
    (result,) = Generator(tiny.model).run([Request(ids, given)])
    assert [each.token for each in result.logprobs] == result.token_ids
    steps = reference_steps(tiny, ids, given)
    for place, each in enumerate(result.logprobs):
        logs = steps[each.step - 1][place]
        assert each.logprob == pytest.approx(logs[each.token], abs=1e-4)
        assert [logprob for _, logprob in each.top] == pytest.approx(
            np.sort(logs)[::-1][:5].tolist(), abs=1e-4
        )
        for token, logprob in each.top:
            assert logprob == pytest.approx(logs[token], abs=1e-4)
    if settle_steps:
        assert len({each.step for each in result.logprobs}) > 1


def test_events_bring_the_scores_of_their_own_tokens(
    tiny: Pair, prompt: Callable[..., list[int]]
) -> None:
    given = params(tiny, settle_steps=1, confidence_threshold=0.4, max_new_tokens=64)
    scores = []
    for event in Generator(tiny.model).stream(Request(prompt(40), given)):
        if isinstance(event, Settled):
            assert [each.token for each in event.logprobs] == event.tokens
            scores += event.logprobs
        elif isinstance(event, Block):
            assert [each.token for each in event.logprobs] == event.tokens[event.settled :]
            scores += event.logprobs
    (result,) = Generator(tiny.model).run([Request(prompt(40), given)])
    assert scores == result.logprobs


@pytest.mark.parametrize("on_device", [False, True])
def test_a_prompt_s_tokens_have_those_of_the_encoder(
    tiny: Pair, prompt: Callable[..., list[int]], on_device: bool
) -> None:
    device = open_model(tiny.graphs, check=False, backend=FakeBackend())
    model, ids, told = device if on_device else tiny.model, prompt(150), []
    given = params(tiny, logprob_token_ids=(7, 5), top_logprobs=0)
    request = Request(ids, given, prompt_scores=told)
    generator = Generator(model, prefixes=PrefixCache(model, 2**24))
    generator.run([request])
    told.clear()
    generator.run([request])  # cached prefixes have no log-probabilities
    reference = tiny.reference.model
    with torch.no_grad():
        hidden = reference.model.encoder(input_ids=torch.tensor([ids])).last_hidden_state[0]
        cap = reference.config.text_config.final_logit_softcapping
        logits = torch.tanh(reference.lm_head(hidden).float() / cap) * cap
    logs = log_softmax(logits.numpy())
    assert [each.token for each in told] == ids
    assert told[0].logprob is None
    for row, token, each in zip(logs, ids[1:], told[1:], strict=False):
        listed = dict.fromkeys((token, 7, 5))
        assert each.logprob == pytest.approx(row[token], abs=1e-4)
        assert dict(each.top) == pytest.approx({other: row[other] for other in listed}, abs=1e-4)
    with pytest.raises(CanvasError, match="score_blocks is not supported together with log-prob"):
        generator.check(replace(request, params=params(tiny, score_blocks=True)))


def test_a_prompt_whose_chunks_overload_an_expert_is_scored_in_parts(
    tiny: Pair, prompt: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has no pass for 512 tokens in which experts cannot overflow, so chunks are divided."""
    monkeypatch.setattr("canvasrt.expert_slots.usual_capacity", lambda model, tokens: 2)
    backend = FakeBackend(body_profiles(capacity=(1, 64, 256)))
    device = open_model(tiny.graphs, check=False, backend=backend)
    assert device.shapes.roomy == 256
    found = []
    for model in (device, tiny.model):
        told: list[TokenScore] = []
        request = Request(prompt(980), params(tiny, max_new_tokens=1), prompt_scores=told)
        (result,) = Generator(model).run([request])
        found.append((result.token_ids, [each.logprob for each in told[1:]]))
    assert device.counters.overflows
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-4)


@pytest.mark.parametrize("cached", [0, 2**24])
def test_requests_that_share_a_list_score_a_prompt_once(
    tiny: Pair, prompt: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch, cached: int
) -> None:
    head, ids, counted = tiny.model.host_head, prompt(400), list[int]()
    score = head.scores
    monkeypatch.setattr(
        head, "scores", lambda rows, *given: counted.append(len(rows)) or score(rows, *given)
    )
    encoded, encode = list[int](), tiny.model.encode
    monkeypatch.setattr(
        tiny.model,
        "encode",
        lambda inputs: encoded.extend(len(each.tokens) for each in inputs) or encode(inputs),
    )
    given, alone, told = params(tiny, max_new_tokens=1), list[TokenScore](), list[TokenScore]()
    (expected,) = Generator(tiny.model).run([Request(ids, given, prompt_scores=alone)])
    each = sum(counted)
    counted.clear()
    encoded.clear()
    generator = Generator(tiny.model, 3, prefixes=PrefixCache(tiny.model, cached))
    results = generator.run([Request(ids, given, prompt_scores=told) for _ in range(5)])
    assert told == alone
    assert sum(counted) == each + 4  # each of the other four scores only its one new token
    assert sum(encoded) == (400 if cached else 5 * 400)
    assert all(result.token_ids == expected.token_ids for result in results)
