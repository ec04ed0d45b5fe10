"""Seeds, pins and restricted positions: generations equal those of transformers, with the same noise, and with logits
of minus infinity for tokens that are not allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import LogitsProcessor

from canvasrt.errors import CanvasError
from canvasrt.runtime.conditions import Conditions, read_conditions
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.host_head import HostHead
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.request import Request, Result
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.reference import Pair, Reference, ReferenceOutput

Prompt = Callable[..., list[int]]
BASE = SamplingParams(
    max_new_tokens=64, max_denoising_steps=9, entropy_bound=1.0, confidence_threshold=1.0
)
SEEDED = Conditions(seed={0: 40, 1: 41, 7: 300, 33: 17})
PINNED = Conditions(pin={0: 40, 5: 41, 6: 300, 31: 9, 32: 8})
FEW = tuple(range(100, 400, 7))
ALLOWED = Conditions(allow={2: (5, 6), 3: FEW, 4: FEW, 40: (8, 9, 10)})
ALL = Conditions({1: 77, 2: 6}, {0: 40, 20: 99, 45: 400}, {2: (5, 6), 3: FEW, 50: FEW})


class Told(Reference):
    """The reference with conditions, as tables: (block, position) → tokens."""

    def __init__(self, model: Any, given: Conditions, length: int, ends: tuple[int, ...]) -> None:
        super().__init__(model)
        self.length, self.block = length, 0
        self.starts: dict[tuple[int, int], int] = {}
        self.sets: dict[tuple[int, int], list[int]] = {}
        for position in range(1024):
            place = divmod(position, length)
            listed = [t for t in range(self.vocab) if t not in ends]
            if position in given.pin:
                self.sets[place] = [given.pin[position]]
            elif position in given.allow:
                self.sets[place] = sorted(given.allow[position])
            elif ends and position < max([given.least, *given.pin]):
                self.sets[place] = listed
            if position in given.seed:
                self.starts[place] = given.seed[position]
        self.processors = [_Only(self)]

    def _noise(self, seeds: list[int], block: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        self.block = block
        uniforms, rows = [], []
        for seed in seeds:
            chances, tokens = step_noise(seed, block, step, self.length, self.vocab)
            for place in range(self.length):
                if (block, place) in self.sets:
                    own = self.sets[block, place]
                    tokens[place] = own[int(tokens[place]) * len(own) // self.vocab]
                if step == 0 and (block, place) in self.starts:
                    tokens[place] = self.starts[block, place]
            uniforms.append(chances)
            rows.append(tokens)
        return np.stack(uniforms), np.stack(rows)


class _Only(LogitsProcessor):
    def __init__(self, told: Told) -> None:
        self.told = told

    def __call__(self, input_ids: object, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for (block, place), tokens in self.told.sets.items():
            if block == self.told.block:
                kept = scores[:, place, tokens].clone()
                scores[:, place] = float("-inf")
                scores[:, place, tokens] = kept
        return scores


def reference(
    pair: Pair, prompt: list[int], params: SamplingParams, given: Conditions
) -> ReferenceOutput:
    length = params.canvas(pair.model.config)
    told = Told(pair.reference.model, given, length, params.eos_token_ids)
    return told.generate([prompt], [params])


def run(pair: Pair, prompt: list[int], params: SamplingParams, given: Conditions) -> Result:
    (result,) = Generator(pair.model).run([Request(prompt, params, conditions=given)])
    return result


@pytest.mark.parametrize(
    ("seed", "given", "length"),
    [(3, SEEDED, 0), (4, PINNED, 16), (3, ALLOWED, 0), (4, ALL, 0), (3, ALL, 16)],
    ids=["seed", "pin", "allow", "all", "all-16"],
)
def test_generations_equal_transformers(
    tiny: Pair, prompt: Prompt, seed: int, given: Conditions, length: int
) -> None:
    """Generates several blocks with early stop, on canvases of two sizes."""
    params = replace(BASE, seed=seed, canvas_length=length)
    expected = reference(tiny, prompt(40, seed), params, given)
    result = run(tiny, prompt(40, seed), params, given)
    expected.check([result])
    assert all(result.token_ids[at] == token for at, token in given.pin.items())
    assert all(result.token_ids[at] in tokens for at, tokens in given.allow.items())
    (free,) = tiny.generate([prompt(40, seed)], [params])
    assert free.token_ids != result.token_ids


@pytest.mark.parametrize("given", [Conditions(pin={40: 77}), Conditions(least=20)], ids=str)
def test_no_answer_ends_before_its_last_pin_or_least(
    tiny: Pair, prompt: Prompt, given: Conditions
) -> None:
    """Half of the vocabulary would end the answer."""
    ends = tuple(range(0, tiny.model.config.vocab_size, 2))
    params = replace(BASE, eos_token_ids=ends, max_new_tokens=96)
    result, free = (run(tiny, prompt(20), params, each) for each in (given, Conditions()))
    last = max([given.least, *given.pin])
    assert len(free.token_ids) <= last < len(result.token_ids)
    assert all(each % 2 for each in result.token_ids[:last])
    assert result.token_ids == reference(tiny, prompt(20), params, given).tokens[0]


def test_a_seed_alone_leaves_the_sampler_to_the_engines(
    tiny: Pair, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = []
    logits = HostHead.logits
    monkeypatch.setattr(
        HostHead, "logits", lambda self, h, *rest: scored.append(len(h)) or logits(self, h, *rest)
    )
    run(tiny, prompt(20), BASE, SEEDED)
    assert not scored
    run(tiny, prompt(20), replace(BASE, max_new_tokens=32), Conditions(pin={3: 4}))
    assert scored


def test_json_is_read() -> None:
    given = {"seed": [17, None, 3], "pin": {"2": 9}, "allow": {"3": [9, 5, 9]}}
    assert read_conditions(given) == Conditions({0: 17, 2: 3}, {2: 9}, {3: (5, 9)})
    assert read_conditions({}) == Conditions()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "canvas is not an object"),
        ({"pins": {}}, "canvas.pins is unknown"),
        ({"seed": None, "pin": []}, "canvas.pin is not an object"),
        ({"seed": 3}, "canvas.seed is not a list"),
        ({"seed": [1, "a"]}, "canvas.seed.1 is 'a'"),
        ({"pin": {"-1": 3}}, "canvas.pin.-1 is not a position"),
        ({"pin": {"1": True}}, "canvas.pin.1 is True"),
        ({"pin": {"1": 3, "01": 4}}, "canvas.pin.01 is given twice"),
        ({"pin": {"64": 3}}, "canvas.pin.64 is out of range"),
        ({"pin": {"2": 512}}, "canvas.pin.2 names token 512"),
        ({"least": -1}, "canvas.least is -1"),
        ({"least": 65}, "canvas.least is 65"),
        ({"least": True}, "canvas.least is True"),
        ({"seed": [-1]}, "canvas.seed.0 names token -1"),
        ({"allow": {"2": 5}}, "canvas.allow.2 is not a list"),
        ({"allow": {"2": []}}, "canvas.allow.2 allows no token"),
        ({"allow": {"2": [5, 600]}}, "canvas.allow.2 names token 600"),
        ({"allow": {"2": list(range(65_537))}}, "canvas.allow lists 65537 tokens"),
        (
            {"pin": {"2": 5}, "allow": {"2": [6]}},
            "canvas.pin.2 is 5, which canvas.allow.2 does not",
        ),
        ({"pin": {"2": 5}, "seed": [0, 0, 6]}, "canvas.seed.2 is 6, which canvas.pin.2 rules out"),
        ({"pin": {"2": 1, "9": 5}}, "canvas.pin.2 ends the answer before canvas.pin.9"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_with_its_path(tiny: Pair, data: Any, message: str) -> None:
    params = replace(BASE, eos_token_ids=(1,))
    with pytest.raises(CanvasError) as error:
        request = Request([5], params, conditions=read_conditions(data))
        Generator(tiny.model).add(request)
    assert error.value.message.startswith(message)
    assert error.value.hint
