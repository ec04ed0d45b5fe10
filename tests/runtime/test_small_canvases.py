"""Canvases smaller than the checkpoint's: results equal those of transformers with this length in its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from canvasrt.errors import CanvasError
from canvasrt.pass_shapes import canvas_sizes
from canvasrt.runtime.answers.infill import infill_request
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.text_state import TextState
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.reference import Pair
from tests.helpers.resident import body_profiles, same

Prompt = Callable[..., list[int]]
BASE = SamplingParams(
    max_new_tokens=40, max_denoising_steps=9, entropy_bound=1.0, confidence_threshold=1.0
)


def check(pair: Pair, prompts: list[list[int]], params: list[SamplingParams]) -> None:
    pair.reference.generate(prompts, params).check(pair.generate(prompts, params))


def test_sizes_are_an_eighth_a_quarter_a_half_and_all() -> None:
    assert canvas_sizes(256) == (32, 64, 128, 256)
    assert canvas_sizes(32) == (4, 8, 16, 32)
    assert canvas_sizes(6) == (3, 6)


@pytest.mark.parametrize(
    ("size", "length", "adaptive"),
    [(4, 1, True), (4, 65, True), (8, 63, False), (8, 150, True), (16, 64, True), (16, 150, False)],
)
def test_tokens_are_those_of_transformers(
    tiny: Pair, prompt: Prompt, size: int, length: int, adaptive: bool
) -> None:
    """Generates several blocks with several seeds, for prompts below, at and beyond the length of the sliding
    window."""
    base = replace(BASE, canvas_length=size, early_stop=adaptive)
    check(
        tiny,
        [prompt(length, seed) for seed in range(3)],
        # Not seed 4: one of its draws is 9e-8 from another token, so rounding would decide.
        [replace(base, seed=s) for s in (5, 6, 7)],
    )


def test_the_trained_checkpoints_too(undertrained: Pair) -> None:
    """This model is unsure, and ends its answers itself."""
    model = undertrained.model
    text = [{"role": "user", "content": "count 7 to 31"}]
    base = SamplingParams.from_defaults(
        model.sampler, model.config, max_new_tokens=48, max_denoising_steps=12, canvas_length=4
    )
    prompts = [undertrained.tokenizer.encode_chat(text)] * 3
    check(undertrained, prompts, [replace(base, seed=seed) for seed in range(3)])


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "shared"])
def test_a_batch_on_a_device_may_mix_sizes(
    tiny: Pair, prompt: Prompt, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Canvases run in passes of their own length, or in longer passes with padding."""
    monkeypatch.setattr("canvasrt.pass_shapes.LENGTHS", (8, 16))
    monkeypatch.setattr("canvasrt.pass_shapes.FIRST_WIDTH", 128)
    backend = FakeBackend(rows_apart=apart)
    model = open_model(tiny.graphs, check=False, backend=backend)
    wanted = [
        Request(prompt(20 + 25 * i, i), replace(BASE, seed=i, canvas_length=size))
        for i, size in enumerate([0, 4, 16, 8, 32, 4, 0])
    ]
    same(Generator(model, 4).run(wanted), Generator(tiny.model).run(wanted))
    assert {call.dims["length"] for call in backend.engines["head"].calls} == {4, 8, 16, 32}
    bodies = {call.dims["length"] for call in backend.engines["body_0"].calls if call.repeats}
    assert bodies == {8, 16, 32}


@pytest.mark.parametrize(("budget", "size"), [(1, 4), (4, 4), (5, 8), (90, 32)])
def test_the_smallest_that_holds_the_budget(tiny: Pair, budget: int, size: int) -> None:
    params = replace(BASE, max_new_tokens=budget, canvas_length=-1)
    assert params.canvas(tiny.model.config) == size
    step = TextState(0, Request([3], params), tiny.model, 0.0).next_step()
    assert len(step.noise) == size


def test_an_infill_takes_the_smallest_that_holds_it(demo: Pair) -> None:
    ids = demo.tokenizer.encode_chat([{"role": "user", "content": "reverse planet"}])
    for size, wanted in ((0, 32), (8, 8), (-1, 8)):
        params = SamplingParams.from_defaults(
            demo.model.sampler, demo.model.config, canvas_length=size
        )
        request = infill_request("te{3}p", ids, params, demo.model, demo.tokenizer)
        assert {len(each) for each in request.canvases} == {wanted}
        (result,) = Generator(demo.model).run([request])
        assert len(result.token_ids) == 6


@pytest.mark.parametrize("size", [5, 64])
def test_other_sizes_are_refused(tiny: Pair, prompt: Prompt, size: int) -> None:
    with pytest.raises(CanvasError, match=f"canvas_length is {size}") as error:
        tiny.generate([prompt(5)], [replace(BASE, canvas_length=size)])
    assert "4, 8, 16, 32" in error.value.hint


def test_the_context_counts_small_blocks(tiny: Pair, prompt: Prompt) -> None:
    """A smaller canvas leaves more room for the prompt."""
    request = Request(prompt(90), replace(BASE, max_new_tokens=4, canvas_length=4))
    request.validate(tiny.model.config, 94)
    with pytest.raises(CanvasError, match="90 tokens and 4 new ones"):
        request.validate(tiny.model.config, 93)


def test_engines_from_before_say_so(tiny: Pair, prompt: Prompt) -> None:
    old = [{name: {"min": n, "opt": n, "max": n} for name, n in (("batch", 1), ("length", 32))}]
    backend = FakeBackend(profiles={**body_profiles(), "head": old}, rows_apart=True)
    model = open_model(tiny.graphs, check=False, backend=backend)
    assert model.canvas_sizes == (32,)
    generator = Generator(model)
    with pytest.raises(CanvasError, match="no canvas of 8 positions") as error:
        generator.add(Request(prompt(5), replace(BASE, canvas_length=8)))
    assert "build the bundle again" in error.value.hint
    generator.run([Request(prompt(5), BASE)])


def test_a_context_of_one_canvas_can_be_probed(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed pass, a worker probes its engines. The probe must fit even the shortest context."""
    monkeypatch.setattr(demo.model, "max_context", demo.model.canvas_length)
    Generator(demo.model).probe()
