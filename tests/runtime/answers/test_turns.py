"""Grammars, reads and infills make room for other callers, and answer as if they were alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from canvasrt.runtime.answers.decision import Blank, DecisionRequest, Labels, Template
from canvasrt.runtime.answers.grammar import Vocabulary, compile_grammar
from canvasrt.runtime.answers.infill import InfillRequest
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Finished, Request
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers import constrained
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.reference import Pair

TEMPLATE = Template(tuple(range(20, 52)), (Blank(0, 2, Labels(((7,), (30,), (45,)))),))

Make = Callable[[Pair, Vocabulary], Any]


def grammar(pair: Pair, words: Vocabulary) -> Any:
    start = compile_grammar({"type": "regex", "regex": "[a-z]{80}"}, words, "g")
    given = {"early_stop": False, "max_denoising_steps": 12, "seed": 3}
    return constrained.request(pair, start, **given)


def read(pair: Pair, words: Vocabulary) -> Any:
    params = SamplingParams.from_defaults(
        pair.model.sampler, pair.model.config, seed=5, max_denoising_steps=2
    )
    return DecisionRequest(list(range(6, 46)), params, templates=(TEMPLATE,), samples=16)


def infill(pair: Pair, words: Vocabulary) -> Any:
    params = SamplingParams.from_defaults(
        pair.model.sampler,
        pair.model.config,
        max_denoising_steps=24,
        early_stop=False,
        max_new_tokens=32,
    )
    canvas = tuple(-1 if place % 3 else 40 + place for place in range(30)) + (1, 0)
    return InfillRequest(
        list(range(6, 46)), params, canvases=(canvas,), words=np.arange(20, 60, 7), end=1
    )


@pytest.mark.parametrize("make", [grammar, read, infill])
@pytest.mark.parametrize("device", [False, True], ids=["cpu", "device"])
def test_they_make_room(
    make: Make, device: bool, demo: Pair, words: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceModel, "quantum", 8)
    model: Model = demo.model
    if device:
        model = open_model(demo.graphs, check=False, backend=FakeBackend())
    hog = replace(make(demo, words), owner="a")
    (alone,) = Generator(model).run([hog])
    generator = Generator(model, 1)
    parked = []
    first = generator.add(hog)
    for _ in range(12):
        assert not [each for each in generator.step() if isinstance(each, Finished)]
    params = SamplingParams.from_defaults(
        model.sampler, model.config, max_new_tokens=8, max_denoising_steps=2
    )
    short = generator.add(Request(hog.prompt_token_ids, params, owner="b"))
    results, order = {}, []
    while not generator.idle:
        for event in generator.step():
            if isinstance(event, Finished):
                order.append(event.id)
                results[event.id] = event.result
        parked.append(first not in generator.running)
    assert order == [short, first]
    assert any(parked)
    again = results[first]
    assert again.token_ids == alone.token_ids
    assert again.steps == alone.steps
    assert again.cached_tokens == alone.cached_tokens
    for ours, theirs in zip(getattr(again, "draws", []), getattr(alone, "draws", []), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
