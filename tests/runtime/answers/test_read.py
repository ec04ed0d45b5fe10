"""Reads compared with transformers: the softmax over the logits of labels, for several steps, draws and forks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.decision import (
    Blank,
    DecisionRequest,
    DecisionResult,
    Labels,
    Template,
    labels_of,
)
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.pictures import insert, read_picture
from canvasrt.runtime.request import Finished
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.pictures import noise, png
from tests.helpers.reference import Pair
from tests.helpers.restricted import cache_of, restricted_steps

Prompt = Callable[..., list[int]]
FIXED = tuple(range(100, 132))
# Labels of three questions: single tokens; labels that differ first at the first or at the second token; and labels
# with the same first token.
SINGLE = Labels(((7,), (300,), (45,)))
TREE = Labels(((9, 20, 5), (9, 21, 5), (11, 20, 6)))
SHARED = Labels(((30, 31), (30, 32)))
TEMPLATE = Template(FIXED, (Blank(0, 2, SINGLE), Blank(1, 8, TREE), Blank(2, 20, SHARED)))


def read(pair: Pair, request: DecisionRequest) -> DecisionResult:
    (result,) = Generator(pair.model).run([request])
    assert isinstance(result, DecisionResult)
    return result


def params(pair: Pair, steps: int = 1, seed: int = 5) -> SamplingParams:
    return SamplingParams.from_defaults(
        pair.model.sampler, pair.model.config, seed=seed, max_denoising_steps=steps
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    mass = np.exp(logits.astype(np.float64) - logits.max())
    return mass / mass.sum()


def expected(
    pair: Pair,
    prompt: list[int],
    steps: int,
    draw: int,
    pins: dict[int, int],
    place: int,
    of: list,
    images: Any = None,
) -> np.ndarray:
    """Return the reference's probabilities of the tokens `of` at `place`, with the tokens `pins` fixed in the
    blanks."""
    given = params(pair, steps)
    allowed = {i: (token,) for i, token in enumerate(FIXED)}
    for blank in TEMPLATE.blanks:
        prefix = tuple(
            pins[blank.begin + i] for i in range(blank.labels.width) if blank.begin + i in pins
        )
        for offset in range(blank.labels.width):
            allowed[blank.begin + offset] = blank.labels.allowed(prefix, offset)

    def noise(step: int) -> tuple[np.ndarray, np.ndarray]:
        uniforms, tokens = step_noise(given.seed, draw, step, len(FIXED), pair.reference.vocab)
        for i, each in allowed.items():  # pinned positions are never renoised
            if len(each) == 1:
                tokens[i] = each[0]
        return uniforms, tokens

    cache = cache_of(pair.reference, prompt, images)
    done = restricted_steps(
        pair.reference, cache, len(prompt), noise(0)[1].tolist(), allowed, given, noise, steps
    )
    return softmax(done[-1].logits[place, of])


@pytest.mark.parametrize("steps", [1, 3])
def test_labels_have_the_probabilities_of_the_reference(
    tiny: Pair, prompt: Prompt, steps: int
) -> None:
    ids = prompt(70)
    result = read(tiny, DecisionRequest(ids, params(tiny, steps), templates=(TEMPLATE,), samples=2))
    for draw in range(2):
        single, tree, shared = (each[draw] for each in result.draws)

        def of(pins: dict[int, int], place: int, tokens: list[int], draw: int = draw) -> np.ndarray:
            return expected(tiny, ids, steps, draw, pins, place, tokens)

        assert single == pytest.approx(of({20: 30}, 2, [7, 300, 45]), abs=1e-4)
        assert shared == pytest.approx(of({20: 30}, 21, [31, 32]), abs=1e-4)
        first = of({20: 30}, 8, [9, 11])
        # For the second fork of TREE, its prefix is fixed, and the blanks of other questions have noise again.
        second = of({8: 9}, 9, [20, 21])
        assert tree == pytest.approx([*(first[0] * second), first[1]], abs=1e-4)
        assert tree.sum() == pytest.approx(1)
    assert result.steps == [2 * 2 * steps]
    assert np.abs(np.log(result.draws[0][0] / result.draws[0][1])).max() > 0.1  # draws differ


def test_a_read_sees_images(tiny: Pair) -> None:
    """The prompt has text and two pictures. The first has more tokens than the sliding window."""
    images = [noise(90, 70), noise(30, 50, 1)]
    pictures = [read_picture(png(each), tiny.model.config.vision or {}, 70) for each in images]
    image = tiny.model.config.image_token_id
    ids = insert([7, 8, 9, image, 10, image, *range(20, 40)], pictures, tiny.model.config)
    request = DecisionRequest(ids, params(tiny), templates=(TEMPLATE,), pictures=pictures)
    seen = Gemma4ImageProcessorPil(max_soft_tokens=70)(images, return_tensors="pt")
    single = expected(tiny, ids, 1, 0, {20: 30}, 2, [7, 300, 45], seen)
    assert read(tiny, request).draws[0][0] == pytest.approx(single, abs=1e-4)
    other = replace(request, pictures=[replace(each, pixels=1 - each.pixels) for each in pictures])
    assert np.abs(read(tiny, other).draws[0][0] - single).max() > 1e-3
    with pytest.raises(CanvasError, match="runs of"):
        read(tiny, replace(request, pictures=pictures[:1]))


def test_a_read_has_its_operators_limits(tiny: Pair) -> None:
    request = DecisionRequest([7], params(tiny, steps=3), templates=(TEMPLATE, TEMPLATE), samples=5)
    assert TEMPLATE.rounds == 2  # passes per draw and step: labels have several tokens
    request.check_limits(3, 60)
    request.check_limits(None, None)
    with pytest.raises(CanvasError, match="steps is 3") as error:
        request.check_limits(2, None)
    assert "allows 2" in error.value.hint
    with pytest.raises(CanvasError, match="60 denoising passes") as error:
        request.check_limits(None, 59)
    assert "allows 59" in error.value.hint


@pytest.mark.parametrize(("owner", "place"), [("b", 1), ("a", 3)])
def test_callers_take_turns(tiny: Pair, owner: str, place: int) -> None:
    """The batch has one place. After three reads of a caller, another read arrives, of another caller or of the
    same."""
    request = DecisionRequest([7, 8], params(tiny), templates=(TEMPLATE,), samples=2, owner="a")
    generator = Generator(tiny.model, 1)
    for _ in range(3):
        generator.add(request)
    generator.step()  # the first read takes the place
    last = generator.add(replace(request, owner=owner))
    order = []
    while not generator.idle:
        order += [each.id for each in generator.step() if isinstance(each, Finished)]
    assert order.index(last) == place


def test_a_read_costs_one_pass_per_draw_and_fork(tiny: Pair, prompt: Prompt) -> None:
    template = Template(FIXED, (Blank(0, 2, SINGLE), Blank(1, 20, SHARED)))
    before = tiny.model.counters.denoise_passes
    read(tiny, DecisionRequest(prompt(20), params(tiny), templates=(template,), samples=3))
    assert tiny.model.counters.denoise_passes - before == 3


def test_labels_of_different_lengths_are_closed_and_filled() -> None:
    labels = labels_of([[5], [5, 6], [7, 8, 9]], end=1, filler=0, path="x")
    assert labels.tokens == ((5, 1, 0, 0), (5, 6, 1, 0), (7, 8, 9, 1))
    assert [(fork.prefix, fork.children) for fork in labels.forks] == [
        ((), (5, 7)),
        ((5,), (1, 6)),
    ]
    with pytest.raises(CanvasError, match=r"x\[1\] has the same tokens as x\[0\]"):
        labels_of([[5], [5]], 1, 0, "x")
