"""The measured model: the released shape with random weights, written to disk once.

Only one body segment is written, and is loaded once for every body segment. All have the same kinds of layers in the
same order, so a pass costs the same. The files then take a fifth of the disk space of all segments. On the device, every copy has its own
memory.
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
    """A model to measure: a key of `synthetic.SHAPES`, `layers` per body segment, and `copies` of that segment."""

    name: str
    layers: int
    copies: int
    precision: str = "bf16"


# The largest input of every matrix product in the made-up calibration. Normalised states are of this magnitude.
MADE_UP_AMAX = 8.0
# Precisions of engines to measure, in addition to a shape's own precision.
QUANTIZED = tuple(name for name in FORMATS if name in SHIPPED)
# The fewest experts and the smallest vocabulary with which TensorRT chooses the released model's kernels. Each token
# keeps the released number of experts: sums over fewer experts would be fused with more operators.
WIDTHS = {"num_experts": 10, "top_k_experts": 8, "vocab_size": 4096}
# Two sliding layers and a full one. The second is like all other sliding layers; the first also has nodes that all
# layers share.
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
        """Bytes of all segments, of the head and of the embedding table."""
        files = self.graphs.manifest.files
        body = files["body_0.bin"]["bytes"] * self.shape.copies
        return body + files["head.bin"]["bytes"] + files["embedding.bin"]["bytes"]


def prepare(shape: Shape, folder: Path) -> Prepared:
    """Return a shape's files; write missing ones to `folder`. Needs `canvasrt[export]`."""
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
    """Return the files with the body's weights quantized by one of canvasrt's recipes; write missing ones to `folder`.

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
    """Return graphs with the sizes of `WIDTHS`, in bf16 or quantized by a recipe with a made-up calibration. Their
    engines have every kernel of the whole model. Writes missing graphs to `folder`."""
    from bench import synthetic

    shape = {"widths": synthetic.SHAPES["released"] | WIDTHS}
    with mock.patch.dict(synthetic.SHAPES, shape):
        prepared = prepare(Shape("widths", FEW_LAYERS, 1), folder)
    return (prepared if recipe == "bf16" else quantized(prepared, recipe, folder)).graphs.path
