"""Cuts a model into graphs: body segments, head and vision tower. Also defines the graphs' inputs and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.defaults import LAYERS_PER_SEGMENT, OCTET
from canvasrt.export import onnx, weights
from canvasrt.export.body import BodySegment
from canvasrt.export.head import Head
from canvasrt.export.vision import Vision
from canvasrt.export.weights import Sources
from canvasrt.graphs.traced import chain, free_queues, name_layers, per_layer

EMBEDDING_FILE = "embedding.bin"


@dataclass(frozen=True)
class SegmentModule:
    """One graph: its module, the sources of its weights, and the indices of the layers that it contains."""

    name: str
    module: nn.Module
    sources: Sources
    layers: tuple[int, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.name}.onnx"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the graph's weights."""
        return next(self.module.parameters()).dtype

    def trace(self, config: ModelConfig, traced: dict[Layer, ir.Model]) -> ir.Model:
        """Return the ONNX graph. It has placeholders for weights. `traced` caches the graphs of single layers."""
        if isinstance(self.module, BodySegment):
            for i in self.layers:
                layer = config.layers[i]
                if layer not in traced:
                    with _default_dtype(self.dtype):
                        single = BodySegment(config, i, 1)
                        traced[layer] = trace_layer(single, layer, config, self.dtype)
            model = chain([traced[config.layers[i]] for i in self.layers])
            name_layers(model, self.layers)
            return model
        if isinstance(self.module, Head):
            return trace_head(self.module, config, self.dtype)
        assert isinstance(self.module, Vision)
        return trace_vision(self.module, config, self.dtype)


def segments(
    config: ModelConfig,
    layers_per_segment: int = LAYERS_PER_SEGMENT,
    dtype: torch.dtype = torch.float32,
) -> list[SegmentModule]:
    """Return the model's graphs: first the bodies in the order of their layers, then the head, then the vision tower if
    there is one. `dtype` is the dtype of weights and hidden states."""
    cut: list[SegmentModule] = []
    count = len(config.layers)
    with _default_dtype(dtype):
        for number, first in enumerate(range(0, count, layers_per_segment)):
            held = range(first, min(first + layers_per_segment, count))
            module = BodySegment(config, first, len(held))
            sources = weights.body_sources(config, first, len(held))
            cut.append(SegmentModule(f"body_{number}", module, sources, tuple(held)))
        cut.append(SegmentModule("head", Head(config), weights.head_sources(config)))
        if config.vision is not None:
            cut.append(SegmentModule("vision", Vision(config), weights.vision_sources(config)))
    return cut


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create placeholders in `dtype` inside a `with` block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trace_layer(
    module: BodySegment, layer: Layer, config: ModelConfig, dtype: torch.dtype
) -> ir.Model:
    """Return the graph of a body segment of one layer. `BodySegment.forward` describes the graph's inputs and
    outputs."""
    batch, length, slots, past = 2, 3, 4, 5
    # Key and value are two tensors, because the tracer would merge inputs that share one tensor.
    cached = (batch, layer.num_kv_heads, past, OCTET, layer.head_dim)
    key, value = (torch.zeros(cached, dtype=dtype) for _ in "kv")
    inputs: dict[str, Any] = {
        "hidden": torch.zeros(batch, length, config.hidden_size, dtype=dtype),
        "positions": torch.zeros(batch, length, dtype=torch.int64),
        "groups": torch.zeros(batch, length, dtype=torch.int64),
        "causal": torch.ones(batch, dtype=torch.bool),
        "slots": torch.arange(slots),
        "gate_slots": torch.arange(slots + 1),
        "gate_queues": torch.arange(config.num_experts),
        "past_positions": {layer.kind: torch.zeros(batch, past, OCTET, dtype=torch.int64)},
        "past": [(key, value)],
    }
    b, n = torch.export.Dim("batch"), torch.export.Dim("length")
    p = torch.export.Dim(f"octets_{layer.kind}")
    dynamic: dict[str, Any] = {
        "hidden": {0: b, 1: n},
        "positions": {0: b, 1: n},
        "groups": {0: b, 1: n},
        "causal": {0: b},
        "slots": {0: torch.export.Dim("capacity")},
        "gate_slots": {0: torch.export.Dim("gate_rows")},
        "gate_queues": None,
        "past_positions": {layer.kind: {0: b, 1: p}},
        "past": [({0: b, 2: p}, {0: b, 2: p})],
    }
    names = [name for name in inputs if not name.startswith("past")]
    names += [f"past_positions_{layer.kind}", *per_layer("past", [0])]
    model = onnx.trace(
        module, inputs, dynamic, names, ["hidden_out", "load", *per_layer("new", [0])]
    )
    free_queues(model)
    return model


def trace_head(module: Head, config: ModelConfig, dtype: torch.dtype) -> ir.Model:
    """Return the graph of the head."""
    batch, length = 2, 3
    inputs: dict[str, Any] = {
        "hidden": torch.zeros(batch, length, config.hidden_size, dtype=dtype),
        "temperature": torch.ones(batch, dtype=torch.float32),
        "entropy_bound": torch.ones(batch, dtype=torch.float32),
        "uniforms": torch.zeros(batch, length, dtype=torch.float32),
        "noise": torch.zeros(batch, length, dtype=torch.int64),
    }
    b, n = torch.export.Dim("batch"), torch.export.Dim("length")
    dynamic = {
        name: {0: b} if name in ("temperature", "entropy_bound") else {0: b, 1: n}
        for name in inputs
    }
    outputs = ["canvas", "argmax", "entropy", "accepted", "next_hidden"]
    return onnx.trace(module, inputs, dynamic, list(inputs), outputs)


def trace_vision(module: Vision, config: ModelConfig, dtype: torch.dtype) -> ir.Model:
    """Return the graph of the vision tower."""
    assert config.vision is not None
    square = config.vision["pooling_kernel_size"] ** 2
    images, patches = 2, 4 * square
    pixels = 3 * config.vision["patch_size"] ** 2
    inputs = {
        "pixel_values": torch.zeros(images, patches, pixels, dtype=dtype),
        "pixel_positions": torch.zeros(images, patches, 2, dtype=torch.int64),
    }
    n = torch.export.Dim("images")
    # The number of patches is divisible by `square`, because a soft token is pooled from a square of patches.
    p = square * torch.export.Dim("soft_tokens")
    dynamic = {name: {0: n, 1: p} for name in inputs}
    return onnx.trace(module, inputs, dynamic, list(inputs), ["features", "valid"])
