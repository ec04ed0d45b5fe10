"""The measured model: the released shape with random weights, written to disk once.

One body segment stands for all of them. Their layers are of the same kinds in the same order, so a pass costs the same, and
the files take a fifth of the disk. On the device, every copy has its own memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from canvasrt.bundle import Bundle, load_bundle
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.extras import require
from canvasrt.formats import FORMATS
from canvasrt.recipes import SHIPPED


@dataclass(frozen=True)
class Shape:
    """Which model: a key of `synthetic.SHAPES`, `layers` per body segment, and `copies` of that segment."""

    name: str
    layers: int
    copies: int
    precision: str = "bf16"


# The largest input of every product in the made-up calibration; normalised states are of this order.
MADE_UP_AMAX = 8.0
# Precisions of engines to measure, besides a shape's own.
QUANTIZED = tuple(name for name in FORMATS if name in SHIPPED)
# The fewest experts and tokens that leave every kernel of the released model unchanged. Each token has as many experts as
# in the released model: sums over fewer experts would be fused with more operators.
WIDTHS = {"num_experts": 10, "top_k_experts": 8, "vocab_size": 4096}
# Two sliding layers and a full one. The second sliding layer stands for all others; the first also has the common nodes.
FEW_LAYERS = 3


@dataclass(frozen=True)
class Prepared:
    """A shape's files: a checkpoint of one segment's layers, its graphs, and the whole model's configuration."""

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

    checkpoint, graphs = folder / f"{shape.name}-checkpoint", folder / f"{shape.name}-graphs"
    if not graphs.exists():
        if not checkpoint.exists():
            synthetic.write_random_checkpoint(
                checkpoint, shape.name, layers=shape.layers, format=shape.precision
            )
        export_graphs(checkpoint, graphs, shape.layers, shape.precision)
    bundle = load_bundle(graphs, kind="graphs", check=False)
    config = bundle.manifest.model
    whole = replace(config, layers=config.layers * shape.copies)
    return Prepared(shape, checkpoint, bundle, whole)


def quantized(prepared: Prepared, precision: str, folder: Path) -> Prepared:
    """Return the files with the body's weights quantized by one of canvasrt's recipes; write what is missing.

    The calibration is made up: no prompt is run, and every input is assumed to reach `MADE_UP_AMAX`. The time of a pass
    does not depend on it.
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


def few_experts(recipe: str, folder: Path) -> Path:
    """Return graphs of `WIDTHS` in a recipe, or in bf16, with a made-up calibration. They have every kernel of the whole
    model. Writes missing graphs to `folder`."""
    from bench import synthetic

    shape = {"widths": synthetic.SHAPES["released"] | WIDTHS}
    with mock.patch.dict(synthetic.SHAPES, shape):
        prepared = prepare(Shape("widths", FEW_LAYERS, 1), folder)
    return (prepared if recipe == "bf16" else quantized(prepared, recipe, folder)).graphs.path
