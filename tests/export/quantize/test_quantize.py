"""Quantized bundles: their content, what stays unchanged, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from canvasrt.bundle import Bundle, load_bundle
from canvasrt.calibration_prompts import CALIBRATED
from canvasrt.errors import CanvasError
from canvasrt.export import onnx
from canvasrt.export.graphs import export_graphs
from canvasrt.export.quantize import network, saved_sweeps
from canvasrt.export.quantize import quantize as module
from canvasrt.export.quantize.calibrate import Calibration
from canvasrt.export.quantize.quantize import quantize_graphs, read_calibration
from canvasrt.graphs import external, lowbits
from canvasrt.progress import listening
from canvasrt.recipes.recipe import CalibrationSettings, Recipe, load_recipe
from tests.helpers import library
from tests.helpers.graph_weights import weights_of

Command = Any
QUICK = CalibrationSettings(prompts=2, max_new_tokens=16)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text('{"prompt_ids": [5, 6, 7, 8]}\n' * 3)
    return file


@pytest.fixture(scope="module")
def nvfp4(plain_graphs: Bundle, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    recipe = replace(load_recipe("nvfp4"), calibration=QUICK)
    return quantize_graphs(plain_graphs, tmp_path_factory.mktemp("nvfp4") / "out", recipe, prompts)


def initializers(bundle: Bundle, file: str) -> dict[str, ir.ExternalTensor]:
    model = ir.load(bundle.file(file))
    return {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }


def test_the_manifest(nvfp4: Bundle, plain_graphs: Bundle) -> None:
    bundle = load_bundle(nvfp4.path, "graphs", check=True)
    manifest, base = bundle.manifest, plain_graphs.manifest
    assert manifest.options["precision"] == "nvfp4"
    assert manifest.options["base_precision"] == "bf16"
    recipe = Recipe.from_json(manifest.options["recipe"])
    assert recipe == replace(load_recipe("nvfp4"), calibration=QUICK)
    quantized = {entry["name"]: entry.get("quantized") for entry in manifest.segments}
    body = [name for name in recipe.formats(manifest.model) if name != "table"]
    assert quantized["body_0"] == dict.fromkeys(body, "nvfp4")
    assert quantized["head"] == {"table": "fp8"}
    assert manifest.made_from["files"] == base.made_from["files"]
    assert manifest.embedding == base.embedding
    assert bundle.unlisted() == []
    found = read_calibration(nvfp4)
    assert found["prompts"] == 2
    assert all(value > 0 for value in found["amax"].values())
    assert found["routed"].keys() == {"layers.0", "layers.1"}
    assert len(found["prompts_sha256"]) == 64


def test_files_that_did_not_change_take_no_space(
    nvfp4: Bundle, plain_graphs: Bundle, tmp_path: Path
) -> None:
    known = Calibration(amax=read_calibration(nvfp4)["amax"])
    experts = quantize_graphs(plain_graphs, tmp_path / "out", "nvfp4-experts", calibration=known)
    for name in ("head.onnx", "head.bin", "embedding.bin"):
        assert experts.file(name).samefile(plain_graphs.file(name))
    # In this recipe, only products with the table are quantized, not the table for lookups.
    assert nvfp4.file("embedding.bin").samefile(plain_graphs.file("embedding.bin"))
    assert not nvfp4.file("head.onnx").samefile(plain_graphs.file("head.onnx"))
    assert nvfp4.file("body_0.bin").stat().st_size < plain_graphs.file("body_0.bin").stat().st_size


def test_weights_and_scales(nvfp4: Bundle, plain_graphs: Bundle) -> None:
    # `weights_of` refuses files with several hard links, and other bundles may link the plain graphs' files.
    before = {
        name: lowbits.from_bf16(external.mapped(tensor).view(np.uint16))
        for name, tensor in initializers(plain_graphs, "body_0.onnx").items()
    }
    after, found = weights_of(nvfp4), read_calibration(nvfp4)
    for name, amax in found["amax"].items():
        if name == "table":
            continue
        local = name + ("" if "experts" in name else ".weight")
        parts = (after[f"{local}.{part}"] for part in ("values", "scale", "block_scales"))
        wide = lowbits.dequantize("nvfp4", *parts)
        if f"{local}.factor" in after:
            wide = wide * after[f"{local}.factor"][:, 0, :, None]
        error = np.linalg.norm(wide.ravel() - before[local]) / np.linalg.norm(before[local])
        assert 0 < error < 0.13, name
        assert after[f"{local}.input_scale"] == np.float32(amax / 2688)
    untouched = set(before) & set(after)
    assert any("router" in name for name in untouched)
    assert all(np.array_equal(before[name], after[name].ravel()) for name in untouched)


def test_large_weights_begin_at_pages(plain_graphs: Bundle) -> None:
    stored = initializers(plain_graphs, "body_0.onnx").values()
    large = [each.offset for each in stored if each.nbytes >= external.LARGE_WEIGHT]
    assert large
    assert not any(offset % 4096 for offset in large)


def test_weights_alone_need_no_prompts(
    plain_graphs: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is not run, so memory does not limit its size."""
    monkeypatch.setattr(module, "calibrate", None)
    made = quantize_graphs(plain_graphs, tmp_path / "out", "int4")
    manifest = load_bundle(made.path, "graphs", check=True).manifest
    assert "calibration" not in manifest.made_from
    assert read_calibration(made)["prompts"] == 0
    quantized = {entry["name"]: entry.get("quantized") for entry in manifest.segments}
    assert quantized["head"] == {"table": "int8"}
    assert set(quantized["body_0"].values()) == {"int4"}
    assert len(quantized["body_0"]) == 12
    assert manifest.embedding["dtype"] == "int8"
    assert manifest.embedding["shape"] == plain_graphs.manifest.embedding["shape"]
    assert made.unlisted() == []


@pytest.mark.parametrize("name", ["nvfp4", "int4"])
def test_from_the_checkpoint_it_has_the_same_bytes(
    plain_graphs: Bundle,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """No plain graphs are written, and sweeps and graphs that an interrupted call finished are not repeated."""
    done: list[str] = []
    sweep, write = network.StreamedNetwork._sweep, onnx.write_graph

    def counted(self: Any, inputs: Any) -> Any:
        done.append("sweep")
        return sweep(self, inputs)

    def interrupted(model: Any, items: Any, file: Path, *rest: Any, **options: Any) -> None:
        write(model, items, file, *rest, **options)
        if file.name == "head.onnx" and file.name not in done:
            done.append(file.name)
            raise KeyboardInterrupt
        done.append(file.name)

    monkeypatch.setattr(saved_sweeps, "SAVE_EVERY", 0)
    monkeypatch.setattr(network.StreamedNetwork, "_sweep", counted)
    monkeypatch.setattr(onnx, "write_graph", interrupted)
    recipe = replace(load_recipe(name), calibration=QUICK)
    options = plain_graphs.manifest.options
    cut = options["layers_per_segment"]
    file = prompts if recipe.is_calibrated else None
    make = partial(export_graphs, library.checkpoint("small"), tmp_path / "out", cut)
    cache = library.empty_cache(tmp_path / "cache")
    monkeypatch.setenv("CANVASRT_CACHE", str(cache))
    rooms = cache / ("calibrations" if recipe.is_calibrated else "quantizations")
    with pytest.raises(KeyboardInterrupt):
        make(calibration=file, recipe=recipe)
    assert [*rooms.iterdir()]
    assert [*tmp_path.iterdir()] == [cache]
    first, done[:] = done.copy(), ["head.onnx"]
    shown: list[tuple[int, int]] = []

    def show(what: str, done: int, of: int) -> None:
        if what == "quantizing":
            shown.append((done, of))

    with listening(show):
        made = make(calibration=file, recipe=recipe)
    assert shown[0][0] > 0.1 * shown[0][1]  # progress includes the kept graph
    assert shown[-1][0] == shown[-1][1]
    assert ("sweep" in first) == recipe.is_calibrated
    assert [each for each in first if each != "sweep"] == ["body_0.onnx", "head.onnx"]
    assert done == ["head.onnx", "head.onnx"]
    left = [each.name for each in rooms.glob("*/*")]
    assert left == [CALIBRATED] * recipe.is_calibrated
    # After weights are removed, the same graphs can be made again, or graphs with other segments and the same scales.
    again = tmp_path / "again"
    export_graphs(library.checkpoint("small"), again, 1, calibration=file, recipe=recipe)
    assert done == ["head.onnx", "head.onnx", "body_0.onnx", "body_1.onnx", "head.onnx"]
    with listening(show):
        expected = quantize_graphs(plain_graphs, tmp_path / "from-graphs", recipe, file)
    assert shown[-1][0] == shown[-1][1]
    for file, entry in expected.manifest.files.items():
        assert made.manifest.files[file] == entry, file
    assert made.manifest.digest == expected.manifest.digest


MIXED = {
    "schema": 1,
    "name": "mixed",
    "description": "two formats, the head, and the cache",
    "quantize": [
        {"weights": "layers.*.experts.*", "format": "nvfp4", "method": "mse"},
        {"weights": "layers.*.attention.qkv", "format": "fp8", "scales": "per_channel"},
        {"weights": "signal_mlp.*", "format": "fp8"},
    ],
    "kv_cache": "fp8",
    "calibration": {"prompts": 1, "max_new_tokens": 16},
}


def test_mixed_precision(plain_graphs: Bundle, prompts: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(json.dumps(MIXED))
    bundle = quantize_graphs(plain_graphs.path, tmp_path / "out", recipe, prompts)
    body, head = initializers(bundle, "body_0.onnx"), initializers(bundle, "head.onnx")
    assert body["layers.1.attention.qkv.weight.scale"].shape.rank() == 1
    assert body["layers.0.experts.down.factor"].dtype == ir.DataType.BFLOAT16
    assert "layers.0.mlp.down.weight" in body
    found = read_calibration(bundle)["cache_amax"]
    scale = body["layers.1.attention.value_scale"].numpy()
    assert scale == np.float32(found["layers.1.value"] / 448)
    # The table stays in the file that the host also reads.
    assert head["table"].location == "embedding.bin"
    assert bundle.file("embedding.bin").samefile(plain_graphs.file("embedding.bin"))
    assert head["signal_mlp.down.weight.values"].dtype == ir.DataType.FLOAT8E4M3FN
    entries = {entry["name"]: entry["quantized"] for entry in bundle.manifest.segments}
    assert entries["head"] == {"signal_mlp.gate_up": "fp8", "signal_mlp.down": "fp8"}
    assert set(entries["body_0"].values()) == {"fp8", "nvfp4"}


def test_inputs_that_were_always_zero_get_a_scale(plain_graphs: Bundle, tmp_path: Path) -> None:
    recipe = load_recipe("nvfp4-experts")
    known = Calibration(dict.fromkeys(recipe.formats(plain_graphs.manifest.model), 0.0))
    bundle = quantize_graphs(plain_graphs, tmp_path / "out", recipe, calibration=known)
    assert weights_of(bundle)["layers.0.experts.down.input_scale"] == 1


def test_quantized_graphs_and_full_folders_are_refused(
    nvfp4: Bundle, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(CanvasError, match=r"is already quantized \(nvfp4\)"):
        quantize_graphs(nvfp4, tmp_path / "out", "fp8", prompts)
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").touch()
    with pytest.raises(CanvasError, match="is not empty"):
        quantize_graphs(nvfp4, tmp_path, "fp8", prompts)


def test_the_command(
    plain_graphs: Bundle,
    prompts: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An existing cache would contain the calibration.
    monkeypatch.setenv("CANVASRT_CACHE", str(library.empty_cache(tmp_path / "cache")))
    out = tmp_path / "out"
    recipe = tmp_path / "quick.yaml"
    recipe.write_text(json.dumps({**MIXED, "kv_cache": None}))
    arguments = ("-p", recipe, "--calibration", prompts, "-o", out)
    done = command("quantize", plain_graphs.path, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["recipe"] == "mixed"
    assert data["digest"] == load_bundle(out).manifest.digest
    assert data["quantized"]["layers.0.experts.down"] == "nvfp4"
    assert done.stderr.splitlines() == ["checking graphs", "calibrating", "quantizing"]
