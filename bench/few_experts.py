"""Graphs of the released widths with few layers and experts: they have every kernel of the whole model."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from bench.shape import MADE_UP_AMAX
from canvasrt.bundle import load_bundle

# The fewest experts and tokens that leave every kernel unchanged. Each token has as many experts as in the released
# model: sums over fewer experts would be fused with more operators.
WIDTHS = {"num_experts": 10, "top_k_experts": 8, "vocab_size": 4096}
# Two sliding layers and a full one. The second sliding layer stands for all others; the first also has the common nodes.
FEW_LAYERS = 3


def few_experts(recipe: str, folder: Path) -> Path:
    """Return graphs of `WIDTHS` in a recipe, or in bf16, with a made-up calibration. Writes missing graphs to
    `folder`."""
    from bench import synthetic
    from canvasrt.export.graphs import export_graphs
    from canvasrt.export.quantize.calibrate import Calibration
    from canvasrt.export.quantize.quantize import quantize_graphs
    from canvasrt.recipes.recipe import load_recipe

    plain, out = folder / "graphs-bf16", folder / f"graphs-{recipe}"
    if not plain.exists():
        shape = {"widths": synthetic.SHAPES["released"] | WIDTHS}
        with mock.patch.dict(synthetic.SHAPES, shape):
            synthetic.write_random_checkpoint(folder / "checkpoint", "widths", layers=FEW_LAYERS)
        export_graphs(folder / "checkpoint", plain, precision="bf16")
    if not out.exists():
        chosen, graphs = load_recipe(recipe), load_bundle(plain, check=False)
        amax = dict.fromkeys(chosen.formats(graphs.manifest.model), MADE_UP_AMAX)
        quantize_graphs(graphs, out, chosen, calibration=Calibration(amax=amax, sha256="made up"))
    return out
