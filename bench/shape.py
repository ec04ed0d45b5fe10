"""The measured model: the released shape with random weights, or a reduced one, written to disk
once.

One body segment stands for all of them. Their layers are of the same kinds in the same order, so a
pass costs the same, and the files take a fifth of the disk. On the device, every copy has its own
memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
# Precisions of engines to measure, besides a shape's own.
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
    from bench import synthetic
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
