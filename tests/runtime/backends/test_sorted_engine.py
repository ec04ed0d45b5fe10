"""Segments in pieces on a fake TensorRT, with kernels over sorted rows between them in Triton's interpreter."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canvasrt.build.expert_forms import find_experts
from canvasrt.build.memory import context_count
from canvasrt.bundle import MANIFEST, Bundle, _digest, load_bundle
from canvasrt.defaults import SORTED
from canvasrt.errors import CanvasError
from canvasrt.export.quantize.calibrate import Calibration
from canvasrt.export.quantize.quantize import quantize_graphs
from canvasrt.graphs.lower import lower_graph
from canvasrt.graphs.names import EXPERT_ROWS
from canvasrt.hashes import canonical
from canvasrt.recipes.recipe import load_recipe
from canvasrt.runtime.backends.sorted_engine import SortedEngine
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.open import open_model
from canvasrt.sorted_rows.description import (
    DOWN_KERNEL,
    GATE_UP_KERNEL,
    SORT,
    SORTED_SUFFIX,
    SortedSegment,
)
from tests.helpers import interpreted
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.interpreted import interpret
from tests.helpers.reference import Pair
from tests.helpers.resident import CANVAS, Prompt, body_profiles, requests, same
from tests.helpers.sorted_bundles import build_sorted, open_sorted

# Few steps, since a pass takes seconds in the interpreter.
SHORT = {"max_new_tokens": CANVAS, "max_denoising_steps": 2}


@pytest.fixture(scope="module")
def bundle(tiny: Pair, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return build_sorted(tiny.graphs, tmp_path_factory.mktemp("sorted") / "engines")


def bodies(model: DeviceModel) -> list[SortedEngine]:
    found = [segment.engine for segment in model.segments[:-1]]
    assert all(isinstance(each, SortedEngine) for each in found)
    return found  # type: ignore[return-value]


def test_tokens_are_those_of_the_standard_form_and_of_transformers(
    bundle: Bundle, tiny: Pair, prompt: Prompt
) -> None:
    """The model is fp32. The prompt is longer than a canvas and its passes are padded, and two blocks are generated."""
    model, device = open_sorted(bundle)
    (wanted,) = requests(tiny, prompt, [40], max_new_tokens=2 * CANVAS, max_denoising_steps=3)
    results = Generator(model).run([wanted])
    same(results, Generator(tiny.model).run([wanted]))
    tiny.reference.generate([list(wanted.prompt_token_ids)], [wanted.params]).check(results)
    assert device.kernels_run % (3 * len(model.config.layers)) == 0
    assert model.counters.overflows == 0


def test_requests_may_share_passes(bundle: Bundle, tiny: Pair, prompt: Prompt) -> None:
    model, _ = open_sorted(bundle, share=True)
    wanted = requests(tiny, prompt, [9, 30], **SHORT)
    same(Generator(model).run(wanted), Generator(tiny.model).run(wanted))


def test_tokens_that_all_go_to_the_same_experts_overflow_nothing(
    bundle: Bundle, tiny: Pair
) -> None:
    model, _ = open_sorted(bundle)
    wanted = requests(tiny, lambda length, seed: [7] * length, [200], **SHORT)
    same(Generator(model).run(wanted), Generator(tiny.model).run(wanted))
    assert model.counters.overflows == 0


def test_plain_tensorrt_captures_the_pieces(bundle: Bundle, tiny: Pair, prompt: Prompt) -> None:
    """The kernels between the pieces run on the same stream, in order."""
    model, device = open_sorted(bundle, rtx=False)
    wanted = requests(tiny, prompt, [9], **SHORT | {"max_denoising_steps": 4}, early_stop=False)
    same(Generator(model).run(wanted), Generator(tiny.model).run(wanted))
    pieces = len(model.config.layers) + len(bodies(model))
    # In the last two of four steps, the graphs of the pieces and of the head are replayed.
    assert device.replayed >= pieces + 1
    assert device.count("capture") == pieces + 1


@pytest.mark.parametrize("recipe", ["int4", "fp8", "nvfp4-experts"])
def test_quantized_experts_compute_what_the_graph_does(
    recipe: str, tiny: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels use the graph's codes and scales. All formats but INT4 also round the inputs of both products, where
    the last bit of a sum may lead to the next code. A kernel that reads wrong weights is detected."""
    graphs = tmp_path / "graphs"
    chosen = load_recipe(recipe)
    amax = dict.fromkeys(chosen.formats(tiny.model.config), 4.0)
    quantize_graphs(tiny.graphs, graphs, chosen, calibration=Calibration(amax=amax))
    engines = build_sorted(graphs, tmp_path / "engines", precision=recipe)
    model, _ = open_sorted(engines)
    if recipe.startswith("nvfp4"):
        graphs = lowered(load_bundle(graphs), tmp_path / "lowered")
    standard = open_model(graphs, backend=FakeBackend(body_profiles()), check=False)
    assert isinstance(standard, DeviceModel)
    ours, theirs = (states(each) for each in (model, standard))
    spread = np.abs(theirs).max()
    assert np.abs(ours - theirs).max() < (1e-5 if recipe == "int4" else 0.01) * spread

    def wrong(form: Any, grid: Any, arguments: list[Any], capability: Any) -> None:
        arguments[1] += 16 * (form.function == DOWN_KERNEL)
        interpret(form, grid, arguments, capability)

    monkeypatch.setattr(interpreted, "interpret", wrong)
    with pytest.raises(CanvasError, match=r"our kernels .*gate_up-.*, down-.* are wrong"):
        open_sorted(engines)


@pytest.mark.parametrize("broken", [SORT, GATE_UP_KERNEL, DOWN_KERNEL])
def test_a_kernel_that_does_nothing_is_refused(
    broken: str, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def skip(form: Any, *arguments: Any) -> None:
        if form.function != broken:
            interpret(form, *arguments)

    monkeypatch.setattr(interpreted, "interpret", skip)
    with pytest.raises(CanvasError, match="kernels gate_up-float32, down-float32 are wrong"):
        open_sorted(bundle)


def lowered(graphs: Bundle, out: Path) -> Path:
    """Return a copy of a bundle with lowered graphs. ONNX Runtime needs these, since it has no operator that quantizes
    to NVFP4."""
    shutil.copytree(graphs.path, out)
    for entry in graphs.manifest.segments:
        (out / entry["file"]).unlink()
        (out / entry["file"]).with_suffix(".bin").unlink()
        lower_graph(graphs.file(entry["file"]), out / entry["file"])
    listed = json.loads((out / MANIFEST).read_text())
    for name, entry in listed["files"].items():
        entry["bytes"] = (out / name).stat().st_size
    listed["digest"] = _digest(listed)
    (out / MANIFEST).write_text(canonical(listed))
    return out


def states(model: DeviceModel) -> np.ndarray:
    """Run a pass over random hidden states, some of which are padding; return the resulting hidden states."""
    shape = model.shapes.denoise(model.shapes.widths[0], need=CANVAS)
    this = model._pass(shape, [], CANVAS, head=False)
    positions = model.workspace.inputs.view("positions", 1, this.length)
    positions[:] = np.arange(this.length)
    positions[:, -5:] = -1
    model.workspace.inputs.upload()
    given = np.random.default_rng(0).standard_normal((1, this.length, model.config.hidden_size))
    model.device.upload(model.workspace.hidden[0], given.astype(np.float32))
    assert model._run(this, [CANVAS] * 2) is None
    return model.workspace.last_hidden(1, this.length)[0, :-5]


def test_canvases_have_one_shape_and_each_place_one_context(bundle: Bundle) -> None:
    model, _ = open_sorted(bundle)
    assert model.shapes.canvas_rows == (CANVAS,)
    this = model._pass(model.shapes.denoise(model.shapes.widths[0]), [], CANVAS, head=False)
    for slot in (0, 2, 2):
        this = replace(this, first=slot)
        model.workspace.inputs.view("positions", this.batch, this.length)[:] = -1
        model._run(this, [CANVAS] * 2)
    pieces: list[Any] = [piece for each in bodies(model) for piece in each._pieces]
    # The shared context of each profile comes first, then the contexts of places.
    shared = ((0, None), (1, None), (2, None))
    assert {tuple(piece._contexts) for piece in pieces} == {(*shared, (1, 0), (1, 2))}
    assert not model.workspace.fullest(0).any()


def test_the_plan_counts_every_context(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    model, device = open_sorted(bundle, share=True)
    monkeypatch.setattr(interpreted, "interpret", lambda *_: None)  # results do not matter here
    model.warm_up()
    planned = context_count(model.config, model.shapes, len(bodies(model)), find_experts(SORTED))
    assert device.count("context") == planned


def test_rows_that_nobody_writes_are_not_read(bundle: Bundle) -> None:
    """Padding has no rows. Stale rows of another request, even NaN, must not be read. Segments share the memory of rows
    and the kernels."""
    model, device = open_sorted(bundle)
    clean = states(model)
    (between,) = {each._between for each in bodies(model)}
    assert sorted(form.function for form in device.forms) == ["down", "gate_up", "sort_rows"]
    size = between._most[EXPERT_ROWS]
    device.upload(between.address(EXPERT_ROWS), np.full(size // 4, np.nan, np.float32))
    device.synchronize()
    assert np.array_equal(states(model), clean)


def test_a_gpu_that_has_no_kernels_is_refused(bundle: Bundle) -> None:
    with pytest.raises(CanvasError, match=r"no kernels for a GPU of compute capability 12\.1"):
        open_sorted(bundle, then=lambda device: setattr(device, "capability", (12, 1)))


def test_a_damaged_description_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    file = Path(shutil.copy(bundle.file(f"body_0{SORTED_SUFFIX}"), tmp_path))
    again = tmp_path / f"again{SORTED_SUFFIX}"
    SortedSegment.read(file).write(again)
    assert again.read_bytes() == file.read_bytes()
    for text, words in (
        ("{}", "cannot be read as a segment of sorted rows"),
        (file.read_text().replace("16,\n  64", "32,\n  64"), r"kernels have tiles of \(32, 64\)"),
    ):
        file.write_text(text)
        with pytest.raises(CanvasError, match=words):
            SortedSegment.read(file)
        shutil.copy(again, file)
