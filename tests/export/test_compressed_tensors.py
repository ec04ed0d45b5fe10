"""INT4 checkpoints of compressed-tensors: graphs contain their codes and scales, byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from canvasrt.build.source import find_source
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.checkpoints.description import describe
from canvasrt.errors import CanvasError
from canvasrt.export.checkpoint import Checkpoint
from canvasrt.export.compressed_tensors import Int4Codes, _block, read_int4
from canvasrt.export.segments import segments
from canvasrt.export.weights import weights
from canvasrt.recipes.recipe import Choice, Recipe
from tests.helpers import library
from tests.helpers.quantized import dequantize
from tests.helpers.quantized_checkpoints import edit

DECODER = "model.decoder.layers"
# A graph's weight → the modules from which it is stacked.
STACKED = {
    "layers.0.attention.qkv.weight": [f"{DECODER}.0.self_attn.{p}_proj" for p in "qkv"],
    "layers.1.attention.qkv.weight": [f"{DECODER}.1.self_attn.{p}_proj" for p in "qk"],
    "layers.1.mlp.down.weight": [f"{DECODER}.1.mlp.down_proj"],
    "layers.0.experts.gate_up": [
        f"{DECODER}.0.experts.{e}.{p}_proj" for e in range(8) for p in ("gate", "up")
    ],
    "layers.1.experts.down": [f"{DECODER}.1.experts.{e}.down_proj" for e in range(8)],
}


@pytest.fixture
def checkpoint() -> Path:
    return library.checkpoint("as-int4")


@pytest.fixture
def exported() -> Bundle:
    return load_bundle(library.graphs("as-int4", "int4"), check=False)


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def read(folder: Path, name: str) -> Int4Codes | None:
    """Return one weight of the first body segment."""
    config = describe(folder).model
    part = segments(config, 6, torch.bfloat16)[0]
    found = weights(part.module, part.sources, Checkpoint(folder))
    return read_int4(next(weight for weight in found if weight.name == name))


def unpacked(tensors: dict[str, torch.Tensor], modules: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of stacked modules, unpacked by compressed-tensors."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    codes = [
        unpack_from_int32(tensors[f"{m}.weight_packed"], 4, tensors[f"{m}.weight_shape"])
        for m in modules
    ]
    scales = [tensors[f"{m}.weight_scale"].float() for m in modules]
    return torch.cat(codes).numpy(), torch.cat(scales).numpy()


@pytest.mark.parametrize("name", STACKED)
def test_the_graph_has_the_checkpoint_s_codes(
    checkpoint: Path, exported: Bundle, name: str
) -> None:
    stored = ir.load(exported.file("body_0.onnx")).graph.initializers
    values, scales = (stored[f"{name}.{part}"].const_value for part in ("values", "block_scales"))
    codes, expected = unpacked(load_file(checkpoint / "model.safetensors"), STACKED[name])
    assert values.dtype == ir.DataType.INT4
    assert scales.dtype == ir.DataType.BFLOAT16
    np.testing.assert_array_equal(values.numpy().astype(np.int8).reshape(codes.shape), codes)
    found = scales.numpy().astype(np.float32).reshape(expected.shape)
    np.testing.assert_array_equal(found, expected)


def test_the_manifest_says_what_it_is(checkpoint: Path, exported: Bundle) -> None:
    assert find_source(checkpoint).formats == find_source(exported.path).formats
    options = exported.manifest.options
    assert options["precision"] == "int4"
    assert options["checkpoint_quantization"]["algorithm"] == "INT4"
    # The same weights are quantized as in canvasrt's `int4` recipe, so that recipe's limits apply.
    assert options["recipe"]["name"] == "int4"
    assert options["recipe"]["limits"]["answers_lost"] == 2
    (body,) = (each for each in exported.manifest.segments if "layers" in each)
    assert set(body["quantized"].values()) == {"int4"}
    assert len(body["quantized"]) == 12
    chosen = Recipe.from_json(options["recipe"]).formats(exported.manifest.model)
    assert chosen["table"] == Choice("int8")
    assert {each.format for name, each in chosen.items() if name != "table"} == {"int4"}


def test_one_scale_per_output_is_shared_by_its_blocks(copy: Path) -> None:
    """TensorRT would widen a weight with one scale per row before the product, so the scale is repeated for every
    block."""
    scale = f"{DECODER}.1.mlp.down_proj.weight_scale"
    edit(copy, lambda tensors: tensors.update({scale: tensors[scale][:, :1].contiguous()}))
    name = "layers.1.mlp.down.weight"
    codes, scales = unpacked(load_file(copy / "model.safetensors"), STACKED[name])
    found = read(copy, name)
    assert found is not None
    packed = found.pack()
    assert packed.block_scales is not None
    assert packed.form.block == 64
    assert packed.block_scales.shape == (len(codes), codes.shape[1] // 64)
    assert (packed.block_scales == scales).all()
    np.testing.assert_array_equal(dequantize(packed), codes * scales)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("weight_zero_point", (8, 8), "INT4 with zero points is not supported"),
        ("weight_g_idx", (128,), "INT4 with reordered inputs is not supported"),
    ],
)
def test_what_has_no_product_is_refused_by_name(
    copy: Path, kind: str, shape: tuple[int, ...], message: str
) -> None:
    name = f"{DECODER}.0.self_attn.k_proj.{kind}"
    edit(copy, lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.int32)}))
    with pytest.raises(CanvasError, match=message) as raised:
        find_source(copy)
    assert name in str(raised.value)
    index = {"weight_map": {name: "model.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CanvasError, match=message):
        find_source(copy)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_positive_and_finite(copy: Path, value: float) -> None:
    name = f"{DECODER}.1.mlp.down_proj.weight_scale"
    edit(copy, lambda tensors: tensors[name].view(-1)[3:4].fill_(value))
    found = read(copy, "layers.1.mlp.down.weight")
    assert found is not None
    with pytest.raises(CanvasError, match=f"{name} in .* a scale must be positive and finite"):
        found.pack()


def test_damaged_parts_are_named(copy: Path) -> None:
    name = f"{DECODER}.1.mlp.down_proj"
    whole = load_file(copy / "model.safetensors")

    def without(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{name}.weight_scale"]

    edit(copy, without)
    with pytest.raises(CanvasError, match=f"no tensor {name}.weight_scale"):
        read(copy, "layers.1.mlp.down.weight")
    save_file(whole, copy / "model.safetensors", {"format": "pt"})

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.weight_packed"] = tensors[f"{name}.weight_packed"][:, 1:].contiguous()

    edit(copy, cut)
    with pytest.raises(CanvasError, match=f"{name}.weight_packed .* has int32"):
        read(copy, "layers.1.mlp.down.weight")


def test_parts_of_one_product_in_several_formats_are_refused(copy: Path) -> None:
    name = f"{DECODER}.0.self_attn.v_proj"

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        shape = tensors.pop(f"{name}.weight_shape").tolist()
        del tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]
        tensors[f"{name}.weight"] = torch.zeros(shape, dtype=torch.bfloat16)

    edit(copy, widen)
    with pytest.raises(CanvasError, match=f"is int4 and {name}.weight is not"):
        read(copy, "layers.0.attention.qkv.weight")


def test_an_unsupported_group_length_is_named_with_the_supported_ones() -> None:
    held = MagicMock(path="checkpoint")
    held.__contains__.return_value = True
    held.shape.return_value = (4, 12)  # twelve scales per row
    weight: Any = SimpleNamespace(shape=(4, 12 * 24), checkpoint=held)
    with pytest.raises(CanvasError, match="groups of 24 inputs, not of 16, 32, 64, 128 or 256"):
        _block(weight, "part")
