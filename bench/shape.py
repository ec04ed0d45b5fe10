"""What is measured: the released model's shape with random weights, or a reduced one, written to
disk once.

One body segment stands for all of them. Their layers are of the same kinds in the same order, so a
pass costs the same, and the files take a fifth of the disk. On the device, every copy has its own
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from canvasrt.bundle import Bundle, load_bundle
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.extras import require
from canvasrt.formats import FORMATS
from canvasrt.recipes import SHIPPED

# One sliding and one full layer, a few experts, and the released canvas.
_SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "sliding_window": 128,
    "num_experts": 16,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 65_536,
}


@dataclass(frozen=True)
class Shape:
    """Which model: `layers` per body segment, and `copies` of that segment."""

    name: str
    layers: int
    copies: int
    precision: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    repeats: int

    @property
    def max_context(self) -> int:
        return max(self.contexts) + 1024


FULL = Shape("released", 6, 5, "bf16", (1, 2, 4, 8), (512, 4096, 32_768), 16, 20)
SMALL = Shape("small", 2, 2, "fp32", (1, 2), (64, 300), 3, 2)


# The largest input of every product in the made-up calibration; normalised states are of this
# order.
MADE_UP_AMAX = 8.0
# What engines may be measured at, besides the precision of a shape.
QUANTIZED = tuple(name for name in FORMATS if name in SHIPPED)


@dataclass(frozen=True)
class Prepared:
    """A shape's files: a checkpoint of one segment's layers, its graphs, and the whole model's
    configuration."""

    shape: Shape
    checkpoint: Path
    graphs: Bundle
    config: ModelConfig

    @property
    def weight_bytes(self) -> int:
        """Bytes of all segments and the head; the table counts once."""
        files = self.graphs.manifest.files
        body = files["body_0.bin"]["bytes"] * self.shape.copies
        return body + files["head.bin"]["bytes"] + files["embedding.bin"]["bytes"]


def prepare(shape: Shape, folder: Path) -> Prepared:
    """Write what is missing in `folder`. Needs `canvasrt[export]`."""
    require("torch", "export")
    from canvasrt.export import synthetic
    from canvasrt.export.graphs import export_graphs

    synthetic.SHAPES.setdefault("small", synthetic.SHAPES["released"] | _SMALL)
    checkpoint, graphs = folder / f"{shape.name}-checkpoint", folder / f"{shape.name}-graphs"
    if not checkpoint.exists():
        synthetic.write_random_checkpoint(
            checkpoint, shape.name, layers=shape.layers, format=shape.precision
        )
    if not graphs.exists():
        export_graphs(checkpoint, graphs, shape.layers, shape.precision)
    bundle = load_bundle(graphs, kind="graphs", check=False)
    return Prepared(shape, checkpoint, bundle, repeated(bundle.manifest.model, shape.copies))


def quantized(prepared: Prepared, precision: str, folder: Path) -> Prepared:
    """Return the files with the body's weights quantized by one of canvasrt's recipes; write what
    is missing.

    The calibration is made up: no prompt is run, and every input is assumed to reach
    `MADE_UP_AMAX`. The time of a pass does not depend on it.
    """
    from canvasrt.export.quantize.calibrate import Calibration
    from canvasrt.export.quantize.quantize import quantize_graphs
    from canvasrt.recipes.recipe import load_recipe

    out = folder / f"{prepared.shape.name}-graphs-{precision}"
    if not out.exists():
        model, recipe = prepared.graphs.manifest.model, load_recipe(precision)
        cached = [
            f"layers.{i}.{part}" for i in range(len(model.layers)) for part in ("key", "value")
        ]
        made_up = Calibration(
            amax=dict.fromkeys(recipe.formats(model), MADE_UP_AMAX),
            cache=dict.fromkeys(cached, MADE_UP_AMAX) if recipe.kv_cache else {},
            sha256="made up",
        )
        quantize_graphs(prepared.graphs, out, recipe, calibration=made_up)
    return replace(prepared, graphs=load_bundle(out, kind="graphs", check=False))


def repeated(config: ModelConfig, copies: int) -> ModelConfig:
    """Return the configuration of a model that repeats the layers of `config`."""
    return replace(config, layers=config.layers * copies)


def experts_graph(shape: Shape, config: ModelConfig, folder: Path) -> Path:
    """Return only one layer's router and experts, `x` `[tokens, D]` → the same, with random weights."""
    torch = require("torch", "export")
    import onnx_ir as ir

    from canvasrt.export import onnx
    from canvasrt.export.layers import rms_norm
    from canvasrt.export.moe import Experts, Router, Slots
    from canvasrt.graphs.external import Stored

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[shape.precision]
    file = folder / f"{shape.name}-experts.onnx"
    if file.exists():
        return file

    class Mixture(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = Router(config), Experts(config)

        def forward(self, x: Any, slots: Any) -> Any:
            index, weights = self.router(rms_norm(x, config.rms_norm_eps)[None])
            valid = torch.ones_like(x[:, 0], dtype=torch.bool)
            queues = torch.arange(config.num_experts)
            mixed, load = self.experts(x, index, weights, valid, Slots(queues, slots, slots))
            return mixed.squeeze(0), load.amax(dim=(0, 1)).to(torch.int64)

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        module = Mixture()
    finally:
        torch.set_default_dtype(before)
    inputs = {"x": torch.zeros(5, config.hidden_size, dtype=dtype), "slots": torch.arange(4)}
    tokens, capacity = torch.export.Dim("tokens"), torch.export.Dim("capacity")
    dynamic = {"x": {0: tokens}, "slots": {0: capacity}}
    model = onnx.trace(module, inputs, dynamic, list(inputs), ["mixed", "load"])
    kinds = {torch.float32: ir.DataType.FLOAT, torch.bfloat16: ir.DataType.BFLOAT16}
    weights = [
        Stored(name, kinds[dtype], tuple(each.shape), partial(_random, each, dtype))
        for name, each in module.named_parameters()
    ]
    onnx.write_graph(model, weights, file, dtype)
    return file


def _random(parameter: Any, dtype: Any) -> Iterator[memoryview]:
    """Yield values of variance 1 / inputs, one row of the first axis at a time; ones for a single
    axis.

    """
    import torch

    generator = torch.Generator().manual_seed(0)
    for row in parameter:
        if row.dim() == 0:
            values = torch.ones(1, dtype=dtype)
        else:
            values = torch.randn(row.shape, generator=generator) * row.shape[-1] ** -0.5
        flat = values.to(dtype).contiguous().view(torch.uint8).numpy()
        yield np.ascontiguousarray(flat).reshape(-1).data
