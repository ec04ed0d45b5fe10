"""Checkpoints that are already quantized: graphs contain their codes, byte for byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from canvasrt.build.source import find_source
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.checkpoints.description import describe
from canvasrt.errors import CanvasError
from canvasrt.export.checkpoint import Checkpoint
from canvasrt.export.graphs import export_graphs
from canvasrt.export.modelopt import StoredCodes, read_codes
from canvasrt.export.segments import segments
from canvasrt.export.weights import weights
from canvasrt.graphs import lowbits
from canvasrt.recipes.recipe import Recipe
from tests.helpers import library
from tests.helpers.graph_weights import weights_of
from tests.helpers.quantized import dequantize
from tests.helpers.quantized_checkpoints import (
    edit,
)

LAYERS, EXPERTS = 2, 8


@pytest.fixture
def nvfp4() -> Path:
    """An NVFP4 checkpoint by ModelOpt with ModelOpt's recipe for this model."""
    return library.checkpoint("as-nvfp4")


@pytest.fixture
def exported() -> Bundle:
    return load_bundle(library.graphs("as-nvfp4", "nvfp4"), check=False)


@pytest.fixture
def copy(nvfp4: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, which tests damage."""
    return Path(shutil.copytree(nvfp4, tmp_path / "checkpoint"))


def stacked(tensors: Mapping[str, torch.Tensor], layer: int, kind: str, suffix: str) -> np.ndarray:
    """Stack the experts' tensors as in the graph, with gate above up."""
    names = ("gate_proj", "up_proj") if kind == "gate_up" else ("down_proj",)
    each = [
        torch.cat(
            [
                torch.atleast_1d(tensors[f"model.decoder.layers.{layer}.experts.{i}.{n}.{suffix}"])
                for n in names
            ]
        )
        for i in range(EXPERTS)
    ]
    found = torch.stack(each)
    return (found.view(torch.uint8) if found.dtype.itemsize == 1 else found.float()).numpy()


def test_nvfp4_codes_are_the_checkpoints(nvfp4: Path, exported: Bundle) -> None:
    tensors, found = load_file(nvfp4 / "model.safetensors"), weights_of(exported)
    for layer, kind in product(range(LAYERS), ("gate_up", "down")):
        name = f"layers.{layer}.experts.{kind}"
        assert np.array_equal(found[f"{name}.values"], stacked(tensors, layer, kind, "weight"))
        blocks = stacked(tensors, layer, kind, "weight_scale")
        assert np.array_equal(found[f"{name}.block_scales"], blocks)
        scales = stacked(tensors, layer, kind, "weight_scale_2")[:, :1, None]
        assert found[f"{name}.factor"].shape == (EXPERTS, 1, 1)
        # `scale` applies before the product and is a power of two. `factor` applies after it and is in bfloat16, like
        # the product.
        assert np.log2(found[f"{name}.scale"]) % 1 == 0
        both = found[f"{name}.scale"] * found[f"{name}.factor"]
        np.testing.assert_allclose(both, scales, rtol=2.0**-8)
        inputs = stacked(tensors, layer, kind, "input_scale")
        assert found[f"{name}.input_scale"] == inputs.max()
    # All other weights equal the checkpoint's bf16 weights.
    name = "model.decoder.layers.1.self_attn.o_proj.weight"
    assert np.array_equal(found["layers.1.attention.o.weight"], tensors[name].float().numpy())


def test_the_manifest_says_what_it_is(nvfp4: Path, exported: Bundle) -> None:
    assert find_source(nvfp4).formats == find_source(exported.path).formats
    options = exported.manifest.options
    assert options["precision"] == "nvfp4"
    assert options["base_precision"] == "bf16"
    assert options["checkpoint_quantization"]["producer"].startswith("modelopt ")
    recipe = Recipe.from_json(options["recipe"])
    assert recipe.name == "nvfp4-experts"
    wanted = {
        name: choice.format for name, choice in recipe.formats(exported.manifest.model).items()
    }
    assert exported.manifest.segments[0]["quantized"] == wanted
    assert "quantized" not in exported.manifest.segments[1]


def test_fp8_of_modelopt() -> None:
    checkpoint = library.checkpoint("as-fp8")
    graphs = load_bundle(library.graphs("as-fp8", "fp8"), check=False)
    assert find_source(checkpoint).formats == find_source(graphs.path).formats
    tensors, found = load_file(checkpoint / "model.safetensors"), weights_of(graphs)
    prefix = "model.decoder.layers.0.self_attn"
    parts = [f"{prefix}.{name}_proj" for name in "qkv"]
    codes = torch.cat([tensors[f"{part}.weight"].view(torch.uint8) for part in parts])
    name = "layers.0.attention.qkv.weight"
    assert np.array_equal(found[f"{name}.values"], codes.numpy())
    # Three matrices with different scales are one product with a scale per output.
    scales = [
        np.full(len(tensors[f"{part}.weight"]), tensors[f"{part}.weight_scale"]) for part in parts
    ]
    assert np.array_equal(found[f"{name}.scale"], np.concatenate(scales))
    inputs = [float(tensors[f"{part}.input_scale"]) for part in parts]
    assert float(found[f"{name}.input_scale"]) == max(inputs)
    name = "layers.1.experts.down"
    assert np.array_equal(found[f"{name}.values"], stacked(tensors, 1, "down", "weight"))
    both = found[f"{name}.scale"] * found[f"{name}.factor"]
    expected = stacked(tensors, 1, "down", "weight_scale")[:, :1, None]
    np.testing.assert_allclose(both, expected, rtol=2.0**-8)
    assert graphs.manifest.options["precision"] == "fp8"
    head = weights_of(graphs, "head")
    gate = tensors["model.decoder.self_conditioning.gate_proj.weight"].view(torch.uint8)
    assert np.array_equal(head["signal_mlp.gate_up.weight.values"][: len(gate)], gate.numpy())


@pytest.mark.acceptance
def test_fp8_dynamic_is_calibrated(tmp_path: Path) -> None:
    """TensorRT needs constant activation scales. They are calibrated by generating with the widened weights."""
    dynamic = library.checkpoint("as-dynamic")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [7 + i, 9, 30]}) + "\n" for i in range(2)))
    how = describe(dynamic).quantization
    assert how is not None
    assert (how.precision, how.static) == ("fp8", False)
    bundle = export_graphs(dynamic, tmp_path / "graphs", calibration=prompts)
    tensors, found = load_file(dynamic / "model.safetensors"), weights_of(bundle)
    name = "layers.1.experts.gate_up"
    assert np.array_equal(found[f"{name}.values"], stacked(tensors, 1, "gate_up", "weight"))
    scales = stacked(tensors, 1, "gate_up", "weight_scale").reshape(EXPERTS, 1, -1)
    np.testing.assert_allclose(
        found[f"{name}.factor"] * found[f"{name}.scale"], scales, rtol=2.0**-8
    )
    o_proj = "model.decoder.layers.0.self_attn.o_proj"
    scale = tensors[f"{o_proj}.weight_scale"].float().numpy().reshape(-1)
    assert np.array_equal(found["layers.0.attention.o.weight.scale"], scale)
    # The experts' inputs are normalised, so the order of their largest magnitude is known.
    assert 0.3 < found[f"{name}.input_scale"] * 448 < 100
    assert bundle.manifest.made_from["calibration"]
    assert {path.name for path in tmp_path.iterdir()} == {"graphs", "prompts.jsonl"}


def test_asked_for_plain_graphs_it_is_widened(nvfp4: Path, tmp_path: Path) -> None:
    tensors = load_file(nvfp4 / "model.safetensors")
    bundle = export_graphs(nvfp4, tmp_path / "graphs", precision="fp32")
    assert bundle.manifest.options["precision"] == "fp32"
    found = weights_of(bundle)["layers.1.experts.down"]
    codes, blocks, scale = (
        stacked(tensors, 1, "down", kind) for kind in ("weight", "weight_scale", "weight_scale_2")
    )
    for expert in range(EXPERTS):
        expected = lowbits.dequantize("nvfp4", codes[expert], scale[expert, 0], blocks[expert])
        np.testing.assert_allclose(found[expert], expected, rtol=1e-6)


_GATE = "model.decoder.layers.1.experts.3.gate_proj"


def _set(name: str, value: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _set(f"{_GATE}.weight_scale_2", torch.tensor(0.0)),
            r"gate_proj\.weight_scale_2 .* is 0\.0",
        ),
        (
            _set(f"{_GATE}.weight_scale_2", torch.tensor(-1.0)),
            r"gate_proj\.weight_scale_2 .* is -1",
        ),
        (
            _set(f"{_GATE}.input_scale", torch.tensor(torch.inf)),
            r"gate_proj\.input_scale .* is inf",
        ),
        (
            lambda t: t.pop(f"{_GATE}.weight_scale"),
            r"no tensor .*3\.gate_proj\.weight_scale, the scale",
        ),
        (lambda t: t.pop(f"{_GATE}.weight_scale_2"), r"no tensor .*3\.gate_proj\.weight_scale_2"),
        (lambda t: t.pop(f"{_GATE}.input_scale"), r"no tensor .*3\.gate_proj\.input_scale"),
        (lambda t: t.pop(f"{_GATE}.weight"), r"no tensor .*3\.gate_proj\.weight"),
        (
            _set(f"{_GATE}.weight", torch.zeros(64, 60, dtype=torch.uint8)),
            r"gate_proj\.weight .* shape \(64, 60\), but config.json asks for 64 columns",
        ),
        (
            _set(f"{_GATE}.weight", torch.zeros(48, 64, dtype=torch.uint8)),
            r"gate_proj\.weight_scale .* but config.json asks for float8_e4m3fn \(48, 8\)",
        ),
        (
            _set(f"{_GATE}.weight", torch.zeros(64, 128, dtype=torch.bfloat16)),
            r"gate_proj\.weight is not quantized",
        ),
    ],
)
def test_damaged_scales_and_shapes(
    copy: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    edit(copy, change)
    with pytest.raises(CanvasError, match=message):
        export_graphs(copy, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}


def codes_of(folder: Path, name: str) -> StoredCodes:
    """Return a weight of the body as the checkpoint stores it."""
    config = describe(folder).model
    body = segments(config)[0]
    each = weights(body.module, body.sources, Checkpoint(folder))
    found = read_codes(next(weight for weight in each if weight.name == name))
    assert found is not None
    return found


def test_scales_that_differ(copy: Path) -> None:
    """If the scales of gate and up differ, `factor` has one number per output. Of different input scales, the largest
    is used."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{_GATE}.weight_scale_2"] *= 3
        tensors[f"{_GATE}.input_scale"] *= 5

    before = codes_of(copy, "layers.1.experts.gate_up")
    assert before.factor is not None
    edit(copy, change)
    after = codes_of(copy, "layers.1.experts.gate_up")
    assert after.form.factor_shape == (EXPERTS, 1, 128)
    ratio = np.ones((EXPERTS, 1, 128))
    ratio[3, :, :64] = 3
    assert after.factor is not None
    changed = (after.factor * after.scale) / (before.factor * before.scale)
    np.testing.assert_allclose(changed, ratio, rtol=1e-6)
    assert before.input_scale is not None
    assert after.input_scale == np.float32(5) * before.input_scale
    wide = torch.cat(list(after.wide())).numpy().reshape(after.form.shape)
    np.testing.assert_allclose(wide, dequantize(after.pack()), rtol=1e-6)


def test_block_scales_are_positive_and_finite(copy: Path) -> None:
    for code in (0x00, 0x80, 0xB0, 0x7F, 0xFF):
        edit(copy, lambda t: t[f"{_GATE}.weight_scale"].view(torch.uint8)[5, 2].fill_(code))  # noqa: B023
        with pytest.raises(CanvasError, match=r"3\.gate_proj\.weight_scale .* has 1 block scales"):
            codes_of(copy, "layers.1.experts.gate_up").pack()


def test_scales_that_nothing_names(copy: Path, tmp_path: Path) -> None:
    (copy / "hf_quant_config.json").unlink()
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CanvasError, match=r"gate_proj\.weight .* is uint8, but its scales"):
        export_graphs(copy, tmp_path / "out")


def test_another_precision_is_refused(nvfp4: Path, tmp_path: Path) -> None:
    with pytest.raises(CanvasError, match="cannot be exported in 'fp8'"):
        export_graphs(nvfp4, tmp_path / "out", precision="fp8")
