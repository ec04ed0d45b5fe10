"""Caches and hidden states that stay on a device: the same tokens, through a fake engine's buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canvasrt.errors import CanvasError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.gpu.launches import OwnPasses
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.open import open_model
from canvasrt.runtime.passes import DenoiseInput, EncodeInput
from canvasrt.runtime.request import Finished, Result
from tests.helpers.fake_engine import FakeBackend, FakeDevice
from tests.helpers.memory import estimate
from tests.helpers.reference import Pair
from tests.helpers.resident import CANVAS, WINDOW, Prompt, body_profiles, requests, same


def resident(path: Path, **options: Any) -> tuple[DeviceModel, FakeBackend]:
    backend = FakeBackend(**options)
    model = open_model(path, check=False, backend=backend)
    assert isinstance(model, DeviceModel)
    return model, backend


@pytest.fixture(scope="module")
def fake(tiny: Pair) -> tuple[DeviceModel, FakeBackend]:
    return resident(tiny.graphs)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "fake" in request.fixturenames:
        model, _ = request.getfixturevalue("fake")
        assert not model.workspace.cache.rows()


@pytest.mark.parametrize("length", [1, WINDOW, 700])
def test_tokens_are_those_of_the_cpu(
    length: int, tiny: Pair, prompt: Prompt, fake: tuple[DeviceModel, FakeBackend]
) -> None:
    """Prompts inside the sliding window, at its edge, and longer than a chunk and a cache's first width."""
    wanted = requests(tiny, prompt, [length])
    same(Generator(fake[0]).run(wanted), Generator(tiny.model).run(wanted))


def test_requests_that_come_and_go_keep_their_tokens(
    tiny: Pair, prompt: Prompt, fake: tuple[DeviceModel, FakeBackend]
) -> None:
    """More requests than slots, of many lengths: slots are taken again, and shared passes have room for all of them."""
    lengths = [5, 300, 40, 700, 1, 90, 64, 500]
    wanted = [
        replace(r, params=replace(r.params, max_new_tokens=CANVAS * (1 + i % 3)))
        for i, r in enumerate(requests(tiny, prompt, lengths))
    ]
    model, backend = fake
    before = len(backend.engines["head"].calls)
    same(Generator(model, 4).run(wanted), Generator(tiny.model, 1).run(wanted))
    batches = {call.dims["batch"] for call in backend.engines["head"].calls[before:]}
    assert batches == {4}


def test_requests_apart_have_widths_of_their_own(
    tiny: Pair, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("canvasrt.pass_shapes.FIRST_WIDTH", 64)
    model, backend = resident(tiny.graphs, rows_apart=True)
    wanted = requests(tiny, prompt, [5, 300, 40, 700, 1, 90, 64, 500])
    same(Generator(model, 4).run(wanted), Generator(tiny.model, 1).run(wanted))
    widths = {8 * call.dims["octets_full"] for call in backend.engines["body_1"].calls}
    assert len(widths) >= 3
    assert widths <= set(model.shapes.widths)


def test_a_step_takes_own_passes_or_a_shared_one_whichever_is_faster(
    tiny: Pair, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's own passes are as wide as its past, shared ones as wide as any; a request moves between both."""
    monkeypatch.setattr("canvasrt.pass_shapes.FIRST_WIDTH", 64)
    model, backend = resident(tiny.graphs)
    widths = model.shapes.widths
    model.own_passes = OwnPasses(widths, dict.fromkeys(widths, 1.0), 2.5)
    rows = [model.new_row() for _ in range(3)]
    model.encode([EncodeInput(row, np.array(prompt(20, seed))) for seed, row in enumerate(rows)])
    noise = step_noise(0, 0, 1, CANVAS, model.config.vocab_size)
    for count, batches in ((1, [1]), (2, [1, 1]), (3, [4])):
        before, hidden = len(backend.engines["head"].calls), model.first_hidden(noise[1])
        model.denoise(
            [DenoiseInput(row, hidden, np.float32(1), 0.1, *noise) for row in rows[:count]]
        )
        assert [each.dims["batch"] for each in backend.engines["head"].calls[before:]] == batches
    for row in rows:
        model.release(row)
    wanted = requests(tiny, prompt, [5, 300, 40, 700, 1, 90, 64, 500])
    same(Generator(model, 4).run(wanted), Generator(tiny.model, 1).run(wanted))
    read: dict[int, set[int]] = {1: set(), 4: set()}
    for call in backend.engines["body_1"].calls:
        read[call.dims["batch"]].add(8 * call.dims["octets_full"])
    assert read == {1: set(widths[:3]), 4: {widths[-1]}}


def test_a_cancelled_request_gives_its_slot_to_the_next(
    tiny: Pair, prompt: Prompt, fake: tuple[DeviceModel, FakeBackend]
) -> None:
    model, _ = fake
    wanted = requests(tiny, prompt, [30] * 6, early_stop=False)
    generator = Generator(model, 4)
    ids = [generator.add(each) for each in wanted]
    generator.step()
    assert len(model.workspace.cache.rows()) == 4
    generator.cancel(ids[1])
    results: dict[int, Result] = {}
    while not generator.idle:
        for event in generator.step():
            if isinstance(event, Finished):
                results[event.id] = event.result
    assert results[ids[1]].finish_reason == "cancelled"
    kept = [i for i in range(6) if i != 1]
    alone = Generator(tiny.model, 1).run([wanted[i] for i in kept])
    same([results[ids[i]] for i in kept], alone)


@pytest.mark.parametrize("rows_apart", [True, False])
def test_an_expert_that_overflows_is_given_room_and_the_pass_goes_on_from_there(
    rows_apart: bool, tiny: Pair, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Far too few, so a canvas overflows alone as well as with others.
    monkeypatch.setattr("canvasrt.pass_shapes.usual_capacity", lambda model, tokens: 2)
    model, backend = resident(tiny.graphs, rows_apart=rows_apart)
    wanted = requests(tiny, prompt, [40, 290], max_new_tokens=2 * CANVAS)
    same(Generator(model).run(wanted), Generator(tiny.model).run(wanted))
    assert model.counters.overflows >= 4
    calls = backend.engines["body_1"].calls
    capacities = {call.dims["capacity"] for call in calls if call.repeats}
    # A request that leaves the shared pass tries the middle capacity first; a lone request knows from its load that
    # this is too small.
    middle = set() if rows_apart else {CANVAS // 2 + 2}
    assert capacities == {2, *middle, CANVAS}
    counts = {name: len(engine.calls) for name, engine in backend.engines.items()}
    if rows_apart:  # after the first segment's overflow, the second had room, too
        assert counts["body_0"] == counts["body_1"]


def test_a_crowded_request_leaves_the_shared_pass_until_its_block_ends(
    tiny: Pair, prompt: Prompt
) -> None:
    """Others go on sharing, in the same shape; nothing that they compute depends on it."""
    model, backend = resident(tiny.graphs)
    rows = [model.new_row() for _ in range(3)]
    model.encode([EncodeInput(row, np.array(prompt(20, seed))) for seed, row in enumerate(rows)])
    rows[1].overload(0, CANVAS)
    rows[1].overload(1, CANVAS)
    noise = step_noise(0, 0, 1, CANVAS, model.config.vocab_size)
    hidden = model.first_hidden(noise[1])
    before = len(backend.engines["head"].calls)
    model.denoise([DenoiseInput(row, hidden, np.float32(1), 0.1, *noise) for row in rows])
    batches = [call.dims["batch"] for call in backend.engines["head"].calls[before:]]
    assert batches == [4, 1]
    model.encode([EncodeInput(rows[1], np.array(prompt(CANVAS, 9)))])
    assert not rows[1].load(0)
    for row in rows:
        model.release(row)


def test_a_parked_request_comes_back_to_the_room_that_its_block_needs(
    tiny: Pair, prompt: Prompt
) -> None:
    """Otherwise it would continue in different shapes, with different last bits."""
    model, _ = resident(tiny.graphs, rows_apart=True)
    row, tokens = model.new_row(), np.array(prompt(20, 1))
    model.encode([EncodeInput(row, tokens)])
    row.overload(1, 20)
    model.park(row, model.first_hidden(tokens[:CANVAS]))
    assert not row.load(1)
    model.encode([EncodeInput(row, tokens)])
    assert (row.load(0), row.load(1)) == (0, 20)
    model.release(row)


def test_profiles_bound_the_batch_and_the_memory(tiny: Pair, prompt: Prompt) -> None:
    model, _ = resident(tiny.graphs, profiles=body_profiles(batch=(1, 1, 2)))
    assert model.max_batch == Generator(model, 8).max_batch == 2
    wanted = requests(tiny, prompt, [20, 30, 40])
    same(Generator(model, 8).run(wanted), Generator(tiny.model).run(wanted))
    larger, _ = resident(tiny.graphs, profiles=body_profiles())
    kept = "key-value cache"
    assert larger.workspace.bytes[kept] == 2 * model.workspace.bytes[kept]


def test_each_phase_takes_the_profile_that_suits_it(tiny: Pair, prompt: Prompt) -> None:
    from canvasrt.engine_profiles import Profiles

    (prefill,) = body_profiles(length=(1, 512, 512), batch=(1, 1, 1))["body"]
    (denoise,) = body_profiles(length=(CANVAS, CANVAS, CANVAS))["body"]
    both = Profiles([{"name": "prefill", **prefill}, {"name": "denoise", **denoise}])
    assert both.pick({"batch": 1, "length": 300}) == 0
    assert both.pick({"batch": 1, "length": CANVAS}) == 1
    assert both.pick({"batch": 4, "length": 300}) is None
    assert both.largest("batch", {"length": CANVAS}) == 4
    assert both.largest("batch", {"length": 300}) == 1
    model, backend = resident(tiny.graphs, profiles={"body": [prefill, denoise]})
    wanted = requests(tiny, prompt, [200, 250])
    same(Generator(model).run(wanted), Generator(tiny.model).run(wanted))
    assert model.max_batch == 4
    calls = {
        (call.dims["length"] > CANVAS, call.dims["batch"])
        for call in backend.engines["body_0"].calls
    }
    assert calls == {(True, 1), (False, 4)}


def test_only_what_the_host_needs_of_a_canvas_crosses(tiny: Pair, prompt: Prompt) -> None:
    """A few bytes per position and step: no logits, caches or hidden states."""
    model, backend = resident(tiny.graphs)
    device, config = backend.device, model.config
    row = model.new_row()
    model.encode([EncodeInput(row, np.array(prompt(100)))])
    hidden: Any = model.first_hidden(step_noise(0, 0, 0, CANVAS, config.vocab_size)[1])
    crossed = []
    for step in (1, 2, 3):
        before = device.uploaded + device.downloaded
        uniforms, noise = step_noise(0, 0, step, CANVAS, config.vocab_size)
        (out,) = model.denoise([DenoiseInput(row, hidden, np.float32(1), 0.1, uniforms, noise)])
        hidden = out.next_hidden
        crossed.append(device.uploaded + device.downloaded - before)
    assert crossed[1] == crossed[2] < crossed[0]
    # The blocks are as large as the largest batch and prefill chunk.
    positions = max(model.max_batch * CANVAS, model.workspace.sizes.encode_tokens)
    assert crossed[1] < 64 * positions
    model.release(row)


def test_hidden_states_of_an_earlier_step_are_refused(
    prompt: Prompt, fake: tuple[DeviceModel, FakeBackend]
) -> None:
    model, _ = fake
    row = model.new_row()
    model.encode([EncodeInput(row, np.array(prompt(10)))])
    uniforms, noise = step_noise(0, 0, 1, CANVAS, model.config.vocab_size)
    first = DenoiseInput(row, model.first_hidden(noise), np.float32(1), 0.1, uniforms, noise)
    (old,) = model.denoise([first])
    model.denoise([replace(first, hidden=old.next_hidden)])
    with pytest.raises(ValueError, match="earlier step"):
        model.denoise([replace(first, hidden=old.next_hidden)])
    model.release(row)


def test_more_requests_than_places_are_an_error(
    prompt: Prompt, fake: tuple[DeviceModel, FakeBackend]
) -> None:
    model, _ = fake
    rows = [model.new_row() for _ in range(model.max_batch + 1)]
    with pytest.raises(CanvasError, match="all 4 cache slots are taken") as raised:
        model.encode([EncodeInput(row, np.array(prompt(3))) for row in rows])
    assert "--max-batch" in raised.value.hint
    for row in rows:
        model.release(row)


def test_the_estimate_counts_what_is_taken(fake: tuple[DeviceModel, FakeBackend]) -> None:
    model, _ = fake
    taken = dict(model.workspace.bytes)
    need = estimate(
        model.config,
        "fp32",
        model.workspace.sizes.past["full"],
        model.max_batch,
        layers_per_segment=len(model.segments[0].layers),
    )
    assert taken.pop("key-value cache") == need.kv_cache
    assert sum(taken.values()) == need.buffers


def test_too_little_memory_is_said_at_load(tiny: Pair) -> None:
    backend = FakeBackend()
    backend.device = FakeDevice(1 << 20)
    with pytest.raises(CanvasError, match="bytes left"):
        open_model(tiny.graphs, check=False, backend=backend)


@pytest.mark.parametrize("quantum", [3])
def test_requests_that_take_turns_keep_their_tokens(
    quantum: int, tiny: Pair, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making room gives the slot away, in the middle of a block too; tokens are encoded again."""
    monkeypatch.setattr(DeviceModel, "quantum", quantum)
    model, _ = resident(tiny.graphs)
    wanted = requests(tiny, prompt, [5, 40, 600], stability_threshold=100)
    parked = []
    real = model.park
    monkeypatch.setattr(
        model, "park", lambda row, hidden: (parked.append(hidden), real(row, hidden))[1]
    )
    same(Generator(model, max_batch=1).run(wanted), Generator(tiny.model).run(wanted))
    assert len(parked) > 3
    assert any(not isinstance(hidden, np.ndarray | None) for hidden in parked)
    assert not model.workspace.cache.rows()
