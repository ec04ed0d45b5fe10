"""Graphs of small random models, and quantized graphs made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from canvasrt.bundle import Bundle, load_bundle
from canvasrt.cache import unfinished
from canvasrt.calibration_prompts import CALIBRATIONS, CalibrationPrompts, work_of
from canvasrt.export.onnx import write_graph
from canvasrt.export.quantize.calibrate import Calibration
from canvasrt.export.quantize.calibrate import calibrate as calibrate_weights
from canvasrt.export.quantize.quantize import quantized_items
from canvasrt.export.quantize.quantizers import form_of, quantize_weight
from canvasrt.export.quantize.stored_weights import StoredWeights
from canvasrt.graphs import external, lowbits
from canvasrt.graphs.packed import Form, Packed
from canvasrt.recipes.recipe import Recipe
from tests.helpers import library

# The released model's head sizes.
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "sliding_window": 32,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 4096,
}
BODY = ("attention.qkv.", "attention.o.", "mlp.gate_up.", "mlp.down.", "experts.")
EXPERTS = ("experts.",)
INPUT_AMAX = 6.0
CACHE_SCALE = 0.03


def quantize_file(
    source: Path,
    out: Path,
    planned: Mapping[str, Form],
    pack: Callable[[str], Packed],
    cache_scales: Mapping[str, float] | None = None,
) -> None:
    """Quantize the graph file `source` to `out`. Weights that are shared with other graphs stay in their files."""
    model, items, apart = external.load(source)
    written = quantized_items(model, items, planned, lambda item: pack(item.name), cache_scales)
    write_graph(model, (each for each in written if each.name not in apart), out, own_files=apart)


def write_small(folder: Path) -> None:
    """Write a checkpoint of one sliding layer with heads of 256 and one full layer with heads of 512."""
    from bench import synthetic

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synthetic.SHAPES, "small", synthetic.SHAPES["released"] | SHAPE)
        synthetic.write_random_checkpoint(folder, "small", layers=2)


def small_graphs() -> Bundle:
    """Return the graphs of `write_small` in bf16."""
    return load_bundle(library.graphs("small", "bf16"), kind="graphs", check=False)


def calibrate(graphs: Bundle, recipe: Recipe, file: Path | None = None) -> Calibration:
    """Calibrate with the weights of plain graphs, by default on canvasrt's prompts."""
    manifest = graphs.manifest
    tokenizer = {Path(name).name: graphs.file(name) for name in manifest.tokenizer or ()}
    prompts = CalibrationPrompts.of(
        file, recipe, manifest.model, manifest.sampler, manifest.made_from, tokenizer
    )
    work = work_of({"graphs": manifest.digest}, recipe, prompts)
    with unfinished(CALIBRATIONS, work) as room:
        return calibrate_weights(StoredWeights(graphs), recipe, prompts, room)


class Quantized:
    """A quantized body graph, and its weights before and after quantization."""

    def __init__(
        self, source: Path, out: Path, format: str, what: tuple[str, ...], weights: str, cache: bool
    ) -> None:
        model = ir.load(source)
        self.file = out
        self.before = {
            # Bundles share files by hard links, which onnx refuses to read.
            name: external.mapped(value.const_value).view(np.uint16)
            for name, value in model.graph.initializers.items()
            if any(part in name for part in what)
        }
        self.shapes = {
            name: tuple(model.graph.initializers[name].const_value.shape.numpy())
            for name in self.before
        }
        self.packed: dict[str, Packed] = {}
        self.forms = {
            name: form_of(shape, format, weights, len(shape) == 3)
            for name, shape in self.shapes.items()
        }

        def pack(name: str) -> Packed:
            wide = lowbits.from_bf16(self.before[name]).reshape(self.shapes[name])
            parts = wide if wide.ndim == 3 else [wide]
            self.packed[name] = quantize_weight(
                parts, format, INPUT_AMAX, weights=weights, experts=wide.ndim == 3, name=name
            )
            return self.packed[name]

        scales = {
            f"layers.{i}.attention.{part}_scale": CACHE_SCALE
            for i in range(2)
            for part in ("key", "value")
        }
        quantize_file(source, out, self.forms, pack, scales if cache else None)

    def bytes_of(self, name: str) -> bytes:
        value = ir.load(self.file).graph.initializers[name].const_value
        assert isinstance(value, ir.ExternalTensor)
        return external.mapped(value).tobytes()


def quantizer(graphs: Bundle, folders: pytest.TempPathFactory) -> Callable[..., Quantized]:
    """Return a function that quantizes the body of `graphs`, once per set of options."""

    @cache
    def make(
        format: str, what: tuple[str, ...] = BODY, weights: str = "per_tensor", cache: bool = False
    ) -> Quantized:
        out = folders.mktemp(format) / "body_0.onnx"
        return Quantized(graphs.file("body_0.onnx"), out, format, what, weights, cache)

    return make


def producers(model: ir.Model, name: str) -> dict[str, ir.Node]:
    """Return the nodes that represent a quantized weight in the graph, by the suffix of their names."""
    return {
        str(node.name).removeprefix(f"{name}/"): node
        for node in model.graph
        if str(node.name).startswith(f"{name}/")
    }


def dequantize(packed: Packed) -> npt.NDArray[np.float32]:
    """Return the weight that `packed` represents, including its factor."""
    weight = lowbits.dequantize(packed.format, packed.values, packed.scale, packed.block_scales)
    if packed.factor is None:
        return weight
    factor = packed.factor if packed.factor.ndim == 1 else packed.factor[..., 0, :]
    return weight * factor[..., None]
