"""Requests of every kind in shared passes, some of them cancelled. Every request gets the tokens that it gets alone."""

from __future__ import annotations

import ctypes
import random
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from canvasrt.runtime.answers.decision import DecisionResult
from canvasrt.runtime.answers.grammar import Vocabulary, compile_grammar
from canvasrt.runtime.answers.infill import infill_request
from canvasrt.runtime.answers.layout import Ask
from canvasrt.runtime.conditions import Conditions
from canvasrt.runtime.engine import EngineCall
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.prefix import PrefixCache
from canvasrt.runtime.request import Finished, Request, Result
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.constrained import request as constrained
from tests.helpers.constrained import schema
from tests.helpers.fake_engine import FakeBackend, FakeEngine
from tests.helpers.reference import Pair

pytestmark = pytest.mark.acceptance
MIXES = 10

TEXTS = ("12+34=", "reverse planet", "sort 40172", "shuffle abdeg " * 40, "upper abc")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 3},
    {"top_p": 0.5, "min_p": 0.01},
    {"settle_steps": 1},
    {"logprobs": True, "top_logprobs": 2},
    {"score_blocks": True},
    {"redo_below": -1e-4, "max_redos": 2},
    {"redo_below": -1e-4, "max_redos": 2, "score_by_denoising": True},
    {"canvas_length": 8},
    {"temperature": 2.0, "early_stop": False},
    {"logit_bias": tuple((token, 100.0) for token in range(90, 99))},
    {"logit_bias": tuple((token, -100.0) for token in range(6, 60))},
)
CONDITIONS = (
    Conditions(pin={0: 90, 5: 91, 40: 9}),
    Conditions(allow={2: (7, 8, 100), 3: (5,)}),
    Conditions(least=50, seed={1: 77}),
)
ASKED = {"layout": "bare", "steps": 2, "samples": 2, "questions": [
    {"type": "choice", "instructions": "?", "choices": [{"value": "46"}, {"value": "451"}]}]}  # fmt: skip
GRAMMARS = (
    {"type": "regex", "regex": "[0-9]{2,60}"},
    {"type": "grammar", "grammar": 'start: ("ab" | "cd")+ "!"'},
    schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 9}),
)


@pytest.fixture(scope="module")
def wanted(demo: Pair, words: Vocabulary) -> list[Request]:
    """Requests that use every option that a caller may choose."""
    found, draw = list[Request](), random.Random(1)
    model, tokenizer = demo.model, demo.tokenizer

    def params(**options: Any) -> SamplingParams:
        given = {"max_new_tokens": draw.choice([3, 32, 70]), "seed": len(found)}
        given |= {"max_denoising_steps": draw.choice([1, 4, 9])} | options
        return SamplingParams.from_defaults(model.sampler, model.config, **given)

    for text in TEXTS:
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        found += [Request(ids, params(**options)) for options in OPTIONS]
        found += [Request(ids, params(max_new_tokens=70), conditions=each) for each in CONDITIONS]
        found += [infill_request("te{1-3}p {2}", ids, params(), model, tokenizer)]
        found += [
            Ask.from_json(ASKED).request([{"role": "user", "content": text}], model, tokenizer, 3)
        ]
        for grammar in GRAMMARS:
            start = compile_grammar(grammar, words, "g")
            found.append(constrained(demo, start, text, seed=len(found)))
    return [replace(each, owner=f"caller {number % 3}") for number, each in enumerate(found)]


def told(result: Result) -> tuple[Any, ...]:
    draws = np.round(np.ravel(result.draws), 3) if isinstance(result, DecisionResult) else ()
    logs = [round(each.logprob, 2) for each in result.logprobs]
    scores = [(round(each.score, 2), each.redone) for each in result.block_scores]
    return (result.token_ids, result.steps, result.finish_reason, list(draws), logs, scores)


class Shaped(FakeEngine):
    """An engine whose results depend on the shape of the pass. On a GPU, only last bits do; here, tokens change."""

    def run(self, call: EngineCall) -> None:
        super().run(call)
        if "hidden_out" in self.outputs:
            self._device.queue(lambda: self._bend(call))

    def _bend(self, call: EngineCall) -> None:
        width = self.shapes["hidden_out"][-1]
        size = call.dims["batch"] * call.dims["length"] * int(width)
        floats = (ctypes.c_float * size).from_address(call.addresses["hidden_out"])
        by_shape = zlib.crc32(repr(sorted(call.dims.items())).encode()) / 2**32
        np.ctypeslib.as_array(floats)[::2] *= np.float32(1 + by_shape / 8)


class ShapedBackend(FakeBackend):
    made = Shaped


def mix(model: Model, requests: list[Request], seed: int, places: int) -> dict[int, Result]:
    """Run random requests that arrive at random steps, and cancel some of them. Return the results of the others by
    index."""
    draw = random.Random(seed)
    generator = Generator(model, places, PrefixCache(model, draw.choice([0, 2**20])))
    left = draw.sample(range(len(requests)), draw.randint(2, 9))
    ids: dict[int, int] = {}
    found: dict[int, Result] = {}
    for _ in range(20_000):
        if left and draw.random() < 0.4:
            number = left.pop()
            ids[generator.add(requests[number])] = number
        for event in generator.step():
            if isinstance(event, Finished):
                found[ids[event.id]] = event.result
        if ids and draw.random() < 0.03:
            generator.cancel(draw.choice(list(ids)))
        if not left and generator.idle:
            break
    assert generator.idle
    return {each: result for each, result in found.items() if result.finish_reason != "cancelled"}


@pytest.mark.parametrize("slots", ["as usual", "few"])
def test_tokens_depend_on_the_request_alone(
    demo: Pair, wanted: list[Request], slots: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if slots == "few":  # canvases then overflow, alone or with others
        monkeypatch.setattr(
            "canvasrt.expert_slots.usual_capacity", lambda _, tokens: max(4, tokens // 6)
        )
    model = open_model(demo.graphs, check=False, backend=ShapedBackend())
    alone: dict[int, Any] = {}
    for seed in range(MIXES):
        monkeypatch.setattr(type(model), "quantum", (3, 96)[seed % 2])
        for number, result in mix(model, wanted, seed, 2 + seed % 3).items():
            if number not in alone:
                alone[number] = told(*Generator(model, 1).run([wanted[number]]))
            assert told(result) == alone[number], (seed, wanted[number])
    assert len(alone) > MIXES
