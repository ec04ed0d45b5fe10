"""With caches and hidden states on a device, tokens are the same as on the host. The engine is a fake."""

from __future__ import annotations

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
from tests.helpers.fake_engine import FakeBackend, FakeDevice
from tests.helpers.memory import estimate
from tests.helpers.reference import Pair
from tests.helpers.resident import CANVAS, Prompt, body_profiles, requests, same


def resident(path: Path, **options: Any) -> tuple[DeviceModel, FakeBackend]:
    backend = FakeBackend(**options)
    model = open_model(path, check=False, backend=backend)
    assert isinstance(model, DeviceModel)
    return model, backend


@pytest.fixture(scope="module")
def fake(tiny: Pair) -> tuple[DeviceModel, FakeBackend]:
    return resident(tiny.graphs)


def started(model: DeviceModel, lengths: list[int], prompt: Prompt) -> list[DenoiseInput]:
    """Encode prompts of these lengths; return the inputs of the requests' first steps."""
    noise = step_noise(0, 0, 1, CANVAS, model.config.vocab_size)
    hidden, rows = model.first_hidden(noise[1]), [model.new_row() for _ in lengths]
    model.encode(
        [
            EncodeInput(row, np.array(prompt(length, seed)))
            for seed, (row, length) in enumerate(zip(rows, lengths, strict=True))
        ]
    )
    return [DenoiseInput(row, hidden, np.float32(1), 0.1, *noise) for row in rows]


def test_a_step_takes_own_passes_or_a_shared_one_whichever_is_faster(
    tiny: Pair, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An own pass is as wide as the request's cached tokens need, and a shared pass has the largest width. Requests
    move between both."""
    monkeypatch.setattr("canvasrt.pass_shapes.FIRST_WIDTH", 64)
    model, backend = resident(tiny.graphs)
    widths = model.shapes.widths
    model.own_passes = OwnPasses(widths, dict.fromkeys(widths, 1.0), 2.5)
    given = started(model, [20] * 3, prompt)
    given[2] = replace(given[2], outputs="hidden")  # like a read, grammar or infill
    for count, batches in ((1, [1]), (2, [1, 1]), (3, [4])):
        before = len(backend.engines["head"].calls)
        model.denoise(given[:count])
        assert [each.dims["batch"] for each in backend.engines["head"].calls[before:]] == batches
    for each in given:
        model.release(each.row)
    wanted = requests(tiny, prompt, [5, 300, 40, 700, 1, 90, 64, 500])
    same(Generator(model, 4).run(wanted), Generator(tiny.model, 1).run(wanted))
    read: dict[int, set[int]] = {1: set(), 4: set()}
    for call in backend.engines["body_1"].calls:
        read[call.dims["batch"]].add(8 * call.dims["octets_full"])
    assert read == {1: set(widths[:3]), 4: {widths[-1]}}


@pytest.mark.parametrize("rows_apart", [True, False])
def test_an_expert_that_overflows_is_given_room_and_the_pass_goes_on_from_there(
    rows_apart: bool, tiny: Pair, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With so few slots, a canvas overflows both alone and with others.
    monkeypatch.setattr("canvasrt.expert_slots.usual_capacity", lambda model, tokens: 2)
    model, backend = resident(tiny.graphs, rows_apart=rows_apart)
    wanted = requests(tiny, prompt, [40, 290], max_new_tokens=2 * CANVAS)
    same(Generator(model).run(wanted), Generator(tiny.model).run(wanted))
    assert model.counters.overflows >= 4
    calls = backend.engines["body_1"].calls
    capacities = {call.dims["capacity"] for call in calls if call.repeats}
    # A request that leaves the shared pass first tries the middle capacity. A lone request knows from its load that
    # this is too small.
    middle = set() if rows_apart else {CANVAS // 2 + 2}
    assert capacities == {2, *middle, CANVAS}
    counts = {name: len(engine.calls) for name, engine in backend.engines.items()}
    if rows_apart:  # once the first segment overflows, the second has room, too
        assert counts["body_0"] == counts["body_1"]


def test_a_crowded_request_leaves_the_shared_pass_until_its_block_ends(
    tiny: Pair, prompt: Prompt
) -> None:
    """The other requests continue to share passes of the same shape, so their results do not change."""
    model, backend = resident(tiny.graphs)
    given = started(model, [20] * 3, prompt)
    for number in (0, 1):
        given[1].row.overload(number, CANVAS)
    before = len(backend.engines["head"].calls)
    model.denoise(given)
    assert [call.dims["batch"] for call in backend.engines["head"].calls[before:]] == [4, 1]
    model.encode([EncodeInput(given[1].row, np.array(prompt(CANVAS, 9)))])
    assert not given[1].row.need(0)


def test_a_parked_request_comes_back_to_the_room_that_its_block_needs(
    tiny: Pair, prompt: Prompt
) -> None:
    """In other shapes, the request's results would have different last bits."""
    model, _ = resident(tiny.graphs, rows_apart=True)
    row, tokens = model.new_row(), np.array(prompt(20, 1))
    model.encode([EncodeInput(row, tokens)])
    row.overload(1, 20)
    model.park(row, model.first_hidden(tokens[:CANVAS]))
    assert not row.need(1)
    model.encode([EncodeInput(row, tokens)])
    assert (row.need(0), row.need(1)) == (0, 20)
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
    """Only a few bytes per position and step are copied between host and device: no logits, caches or hidden states."""
    model, backend = resident(tiny.graphs)
    device, (given,) = backend.device, started(model, [100], prompt)
    crossed = []
    for _ in range(3):
        before = device.uploaded + device.downloaded
        (out,) = model.denoise([given])
        given = replace(given, hidden=out.next_hidden)
        crossed.append(device.uploaded + device.downloaded - before)
    assert crossed[1] == crossed[2] < crossed[0]
    # Copied blocks have room for the largest batch and prefill chunk.
    positions = max(model.max_batch * CANVAS, model.workspace.sizes.encode_tokens)
    assert crossed[1] < 64 * positions


def test_hidden_states_of_an_earlier_step_are_refused(
    prompt: Prompt, fake: tuple[DeviceModel, FakeBackend]
) -> None:
    model, _ = fake
    (first,) = started(model, [10], prompt)
    (old,) = model.denoise([first])
    model.denoise([replace(first, hidden=old.next_hidden)])
    with pytest.raises(ValueError, match="earlier step"):
        model.denoise([replace(first, hidden=old.next_hidden)])
    model.release(first.row)


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
