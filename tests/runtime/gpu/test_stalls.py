"""Events that make requests wait on a GPU, counted in random workloads: new shapes, contexts and captures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canvasrt.bundle import load_bundle
from canvasrt.errors import EngineError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseInput, EncodeInput
from canvasrt.runtime.request import Finished, Result
from tests.helpers.configs import MAX_SHAPES
from tests.helpers.gpu_server import (
    BATCH,
    Server,
    _few_tokens,
    few_slots,
    folder,
    write_engines,
)
from tests.helpers.reference import Pair
from tests.helpers.resident import CANVAS, Prompt, requests, same

__all__ = ["_few_tokens", "few_slots", "folder"]


def workload(server: Server, pair: Pair, prompt: Prompt, seed: int) -> Iterator[tuple[Any, Result]]:
    """Run requests of random lengths that arrive at random steps, and cancel some. Yield each with its result."""
    random = np.random.default_rng(seed)
    lengths = [int(random.choice([3, 60, 100, 130, 300, 700, 1300])) for _ in range(6)]
    wanted = []
    for r in requests(pair, prompt, lengths, max_denoising_steps=4):
        budget, canvas = int(random.integers(1, 3 * CANVAS)), int(random.choice([0, 0, 4, 8, 16]))
        params = replace(r.params, max_new_tokens=budget, canvas_length=canvas)
        wanted.append(replace(r, params=params))
    generator, ids = Generator(server.model, BATCH), {}
    left = list(wanted)
    while left or not generator.idle:
        if left and random.random() < 0.3:
            request = left.pop(0)
            ids[generator.add(request)] = request
        for event in generator.step():
            if isinstance(event, Finished):
                yield ids[event.id], event.result
        if ids and random.random() < 0.02:
            generator.cancel(int(random.choice(list(ids))))


@pytest.mark.parametrize(("rtx", "apart"), [(True, True), (False, False)])
def test_no_request_meets_a_new_shape(
    rtx: bool, apart: bool, few_slots: None, folder: Path, tiny: Pair, prompt: Prompt
) -> None:
    server = Server(folder, rtx, apart)
    server.model.warm_up()
    shapes = len({shape.sizes for shape in server.model.shapes})
    # No encoding pass is as short as this small canvas, so the canvas's fullest shape is an extra shape per width.
    assert shapes <= MAX_SHAPES + len(server.model.shapes.widths)
    warm = server.compiled()
    assert warm
    if rtx:  # with TensorRT, contexts share no kernels
        assert max(warm.values()) <= shapes
    server.device.stalls.clear()
    done = list(workload(server, tiny, prompt, seed=1))
    whole = [(request, result) for request, result in done if result.finish_reason != "cancelled"]
    assert len(whole) >= 3
    for request, result in whole:
        same([result], Generator(tiny.model).run([request]))
    if rtx:
        assert not server.compiled()
    # A capture is still needed when a request's width differs from that of the last request in its place.
    changes = len(done) * len(server.model.shapes.widths)
    assert server.device.count("capture") <= changes * len(server.model.segments)
    assert not server.device.count("context")


@pytest.mark.parametrize(("rtx", "apart"), [(True, True), (False, False)])
def test_every_slot_is_warm(
    rtx: bool, apart: bool, few_slots: None, folder: Path, tiny: Pair, prompt: Prompt
) -> None:
    """Requests within the shortest width never wait, in any slot, even if they overflow."""
    server = Server(folder, rtx, apart)
    server.model.warm_up()
    server.device.stalls.clear()
    wanted = requests(tiny, prompt, [3, 40, 60], max_new_tokens=2 * CANVAS)
    wanted += [replace(r, params=replace(r.params, canvas_length=CANVAS // 2)) for r in wanted]
    same(Generator(server.model, BATCH).run(wanted), Generator(tiny.model).run(wanted))
    assert server.model.counters.overflows
    assert not server.device.stalls


def test_engines_that_feed_all_tokens_to_every_expert(
    tiny: Pair, prompt: Prompt, tmp_path: Path
) -> None:
    """NVFP4 experts take all tokens. The address of their queue is aligned for TensorRT, however few experts there
    are."""
    graphs = load_bundle(tiny.graphs, check=False)
    folder = write_engines(graphs, tmp_path, quantized={"layers.0.experts.gate_up": "nvfp4"})
    server = Server(folder)
    profiles = load_bundle(folder, check=False).manifest.segments[0]["profiles"]
    assert {each["gate_queues"]["max"] for each in profiles} == {1, tiny.model.config.num_experts}
    server.model.warm_up()
    wanted = requests(tiny, prompt, [9, 130], max_denoising_steps=4)
    ours, theirs = (Generator(each).run(wanted) for each in (server.model, tiny.model))
    assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]


def test_tokens_that_stay_in_one_pass_meet_no_new_shape(
    few_slots: None, folder: Path, tiny: Pair
) -> None:
    """Equal tokens go to the same experts, so the experts overflow. Tokens of an image or of a scored block must stay
    in one pass."""
    server = Server(folder)
    server.model.warm_up()
    server.device.stalls.clear()
    random = np.random.default_rng(5)
    before, canvas = random.integers(6, 500, 40), random.integers(6, 500, CANVAS)
    outputs = []
    for model in (server.model, tiny.model):
        row = model.new_row()
        model.encode([EncodeInput(row, before)])
        model.encode([EncodeInput(row, np.full(400, 7), keep=lambda states: True, whole=True)])
        given = step_noise(1, 0, 1, CANVAS, model.config.vocab_size)
        hidden = model.first_hidden(canvas)
        outputs += model.denoise([DenoiseInput(row, hidden, np.float32(0.6), 0.1, *given)])
    assert server.model.counters.overflows >= 1
    assert not server.compiled()
    np.testing.assert_array_equal(outputs[0].argmax, outputs[1].argmax)
    np.testing.assert_allclose(outputs[0].entropy, outputs[1].entropy, atol=1e-4)


@pytest.mark.parametrize("rtx", [True, False], ids=["tensorrt_rtx", "tensorrt"])
def test_slots_that_take_turns_capture_nothing_anew(
    rtx: bool, folder: Path, tiny: Pair, prompt: Prompt
) -> None:
    server = Server(folder, rtx)
    wanted = requests(
        tiny, prompt, [40, 50, 60], max_new_tokens=CANVAS, early_stop=False, max_denoising_steps=5
    )
    Generator(server.model, BATCH).run(wanted)
    # One capture per body segment and slot, since each slot has its own cache, and one for the head.
    bodies = len(server.model.segments) - 1
    assert server.device.count("capture") == BATCH * bodies + 1
    server.device.stalls.clear()
    same(Generator(server.model, BATCH).run(wanted), Generator(tiny.model).run(wanted))
    assert not server.device.stalls


def test_after_an_error_of_the_device_nothing_is_answered(
    folder: Path, tiny: Pair, prompt: Prompt
) -> None:
    """The first pass and every later pass fail, so no wrong token is returned."""
    server = Server(folder)
    server.device.fails_after = 40
    wanted = requests(tiny, prompt, [40])
    for _ in range(2):
        with pytest.raises(EngineError, match="illegal memory access") as raised:
            Generator(server.model).run(wanted)
        assert raised.value.fatal
