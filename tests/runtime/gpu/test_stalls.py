"""What makes a request wait on a GPU: new shapes, contexts and captures, counted over random workloads."""

from __future__ import annotations

import platform
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canvasrt.build import profile_ranges
from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.errors import EngineError
from canvasrt.runtime.backends.tensorrt import TensorRTBackend
from canvasrt.runtime.generator import Finished, Generator
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.open import open_model
from canvasrt.runtime.passes import DenoiseInput, EncodeInput
from canvasrt.runtime.request import Result
from tests.helpers.configs import MAX_SHAPES
from tests.helpers.fake_tensorrt import FakeCudaDevice, IRuntimeCache, engine_file, fake_tensorrt
from tests.helpers.reference import Pair
from tests.helpers.resident import CANVAS, Prompt, requests, same

VERSION, CONTEXT, BATCH = "1.7.1.116", 2048, 3
RTX = {
    "name": "rtx-5090",
    "backend": "tensorrt-rtx",
    "builder_version": VERSION,
    "compute_capability": "12.0",
    "built_on": platform.machine(),
}


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths for contexts as short as the tiny model's."""
    monkeypatch.setattr("canvasrt.pass_shapes.FIRST_WIDTH", 128)


@pytest.fixture
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capacities that the tiny model's canvases overflow."""
    for module in (
        "canvasrt.pass_shapes",
        "canvasrt.runtime.gpu.shape_choice",
        "canvasrt.build.profile_ranges",
    ):
        monkeypatch.setattr(f"{module}.usual_capacity", lambda model, tokens: max(4, tokens // 4))


@pytest.fixture
def folder(tiny: Pair, tmp_path: Path) -> Path:
    """Engines with the profiles that a build gives them."""
    return write_engines(tiny, tmp_path)


def write_engines(tiny: Pair, tmp_path: Path, **entry_fields: Any) -> Path:
    """Write a bundle of fake engines; `entry_fields` change what profiles are made from."""
    graphs: Bundle = load_bundle(tiny.graphs, check=False)
    manifest = graphs.manifest
    entries = []
    for entry in manifest.segments:
        made = profile_ranges.to_json(
            profile_ranges.profiles({**entry, **entry_fields}, manifest.model, CONTEXT, BATCH)
        )
        file = f"{entry['name']}.engine"
        (tmp_path / file).write_bytes(engine_file(graphs.file(entry["file"]), made))
        entries.append({**entry, "file": file, "profiles": made})
    shutil.copy(graphs.file(manifest.embedding["file"]), tmp_path)
    write_manifest(
        tmp_path,
        kind="engines",
        made_from={},
        options={"max_context": CONTEXT, "max_batch": BATCH},
        model=manifest.model,
        sampler=manifest.sampler,
        segments=entries,
        embedding=manifest.embedding,
        tokenizer=None,
        target=RTX,
    )
    return tmp_path


class Server:
    """A bundle's engines behind a fake TensorRT, warmed up as before the first request."""

    def __init__(self, folder: Path, rtx: bool = True, apart: bool = True, **options: Any) -> None:
        self.device = FakeCudaDevice()
        module = fake_tensorrt(VERSION, rtx, self.device)
        backend: Any = TensorRTBackend(RTX, apart, module, self.device, **options)  # type: ignore[arg-type]
        model = open_model(folder, check=False, backend=backend)
        assert isinstance(model, DeviceModel)
        self.model = model
        self.backend = backend

    def compiled(self) -> Counter[str]:
        """New shapes by engine."""
        return Counter(engine for what, engine in self.device.stalls if what == "compile")


def workload(server: Server, pair: Pair, prompt: Prompt, seed: int) -> Iterator[tuple[Any, Result]]:
    """Requests of random lengths that come at random steps, some of them cancelled."""
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


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "shared"])
@pytest.mark.parametrize("rtx", [True, False], ids=["tensorrt_rtx", "tensorrt"])
def test_no_request_meets_a_new_shape(
    rtx: bool, apart: bool, few_slots: None, folder: Path, tiny: Pair, prompt: Prompt
) -> None:
    server = Server(folder, rtx, apart)
    server.model.warm_up()
    shapes = len({shape.sizes for shape in server.model.shapes})
    # No encoding pass is as short as this canvas, whose fullest shape is one more for each width.
    assert shapes <= MAX_SHAPES + len(server.model.shapes.widths)
    warm = server.compiled()
    assert warm
    if rtx:  # contexts of TensorRT share nothing
        assert max(warm.values()) <= shapes
    server.device.stalls.clear()
    done = list(workload(server, tiny, prompt, seed=1))
    whole = [(request, result) for request, result in done if result.finish_reason != "cancelled"]
    assert len(whole) >= 3
    for request, result in whole:
        same([result], Generator(tiny.model).run([request]))
    if rtx:
        assert not server.compiled()
    # What is left is a context and a capture, once for each request slot and shape in use beyond the shortest width.
    calls = BATCH * len(server.model.segments) * 2 * (len(server.model.shapes.widths) - 1)
    assert server.device.count("capture") <= calls
    assert server.device.count("context") <= calls


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "shared"])
@pytest.mark.parametrize("rtx", [True, False], ids=["tensorrt_rtx", "tensorrt"])
def test_every_slot_is_warm(
    rtx: bool, apart: bool, few_slots: None, folder: Path, tiny: Pair, prompt: Prompt
) -> None:
    """Requests that stay within the shortest width wait for nothing, in whichever slot, even if they overflow."""
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
    """As in NVFP4. The queue of all tokens starts where TensorRT wants tensors to, however few experts there are."""
    folder = write_engines(tiny, tmp_path, quantized={"layers.0.experts.gate_up": "nvfp4"})
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
    """Equal tokens go to the same experts, so they overflow. Those of an image, or of a scored block, are not split."""
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
    # A body segment for each slot, whose caches are its own; the head once.
    bodies = len(server.model.segments) - 1
    assert server.device.count("capture") == BATCH * bodies + 1
    server.device.stalls.clear()
    same(Generator(server.model, BATCH).run(wanted), Generator(tiny.model).run(wanted))
    assert not server.device.stalls


def test_what_was_compiled_is_kept_for_the_next_start(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "cache" / "compiled"
    first = Server(folder, compiled=file)
    first.model.warm_up()
    assert sum(first.compiled().values())
    again = Server(folder, compiled=file)
    again.model.warm_up()
    assert not again.compiled()
    assert again.device.waited < 0.2 * first.device.waited


def test_what_another_gpu_compiled_is_not_taken(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "compiled"
    Server(folder, compiled=file).model.warm_up()
    monkeypatch.setattr(IRuntimeCache, "gpu", "another")
    other = Server(folder, compiled=file)
    other.model.warm_up()
    assert other.compiled()


@pytest.mark.parametrize("rtx", [True, False], ids=["tensorrt_rtx", "tensorrt"])
def test_calls_that_cannot_be_captured_run_as_they_are(
    rtx: bool, folder: Path, tiny: Pair, prompt: Prompt, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(folder, rtx)
    server.device.captures = False
    wanted = requests(tiny, prompt, [40], max_new_tokens=CANVAS)
    same(Generator(server.model).run(wanted), Generator(tiny.model).run(wanted))
    assert not server.device.count("capture")
    assert "TensorRT says it cannot be captured" in capsys.readouterr().err


def test_after_an_error_of_the_device_nothing_is_answered(
    folder: Path, tiny: Pair, prompt: Prompt
) -> None:
    """No wrong token: the first pass and every later one fail."""
    server = Server(folder)
    server.device.fails_after = 40
    wanted = requests(tiny, prompt, [40])
    for _ in range(2):
        with pytest.raises(EngineError, match="illegal memory access") as raised:
            Generator(server.model).run(wanted)
        assert raised.value.fatal


def test_shapes_outside_the_profiles_are_refused_by_the_fake(folder: Path) -> None:
    """As TensorRT does; otherwise these tests would prove nothing."""
    server = Server(folder)
    engine = server.backend.engines[0]._engine
    denoise = 1
    assert engine.takes(denoise, "hidden", (1, CANVAS, engine.fake.shapes["hidden"][2]))
    assert not engine.takes(denoise, "hidden", (2, CANVAS, engine.fake.shapes["hidden"][2]))
    assert not engine.takes(denoise, "hidden", (1, CANVAS, 7))
    assert not engine.takes(denoise, "slots", (CANVAS + 1,))
