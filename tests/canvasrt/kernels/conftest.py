"""Engines built for the kernel tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from canvasrt.build.plan import BuildOptions
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.defaults import SLOTTED
from canvasrt.pipeline import build_bundle
from tests.conftest import Command

# The released widths and head sizes, with as few experts and tokens as leave every kernel as it is. Each token has as
# many experts as there: sums over fewer are fused with more.
WIDTHS = {"num_experts": 10, "top_k_experts": 8, "vocab_size": 4096}
# A calibration that is made up: the kernels do not depend on it.
AMAX = 8.0
OPTIONS = BuildOptions(max_context=4096, max_batch=4)

Released = Callable[..., Bundle]


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory, command: Command) -> Released:
    """Return a function that builds engines of two sliding layers and a full one, once per recipe, target and form of the
    experts."""
    pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")
    folder = tmp_path_factory.mktemp("released")
    made: dict[tuple[str, str, str], Bundle] = {}

    def engines(recipe: str, target: str, experts: str = SLOTTED) -> Bundle:
        key = recipe, target, experts
        if key not in made:
            graphs, out = _graphs(folder, recipe).path, folder / "-".join(key)
            if experts == SLOTTED:
                build_bundle(graphs, target, out, OPTIONS)
            else:
                # In a process, where Triton the language compiles even if it interprets in this one.
                sizes = ("--max-context", OPTIONS.max_context, "--max-batch", OPTIONS.max_batch)
                line = ("build", graphs, "-t", target, "-o", out, *sizes, "--experts", experts)
                done = command(*line)
                assert done.returncode == 0, done.stderr
            made[key] = load_bundle(out, check=False)
        return made[key]

    return engines


def _graphs(folder: Path, recipe: str) -> Bundle:
    from canvasrt.export import synthetic
    from canvasrt.export.graphs import export_graphs
    from canvasrt.export.quantize.calibrate import Calibration
    from canvasrt.export.quantize.quantize import quantize_graphs
    from canvasrt.recipes.recipe import load_recipe

    plain, out = folder / "graphs-bf16", folder / f"graphs-{recipe}"
    if not plain.exists():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(synthetic.SHAPES, "widths", synthetic.SHAPES["released"] | WIDTHS)
            synthetic.write_random_checkpoint(folder / "checkpoint", "widths", layers=3)
        export_graphs(folder / "checkpoint", plain, precision="bf16")
    graphs = load_bundle(plain, check=False)
    if not out.exists():
        chosen = load_recipe(recipe)
        amax = dict.fromkeys(chosen.formats(graphs.manifest.model), AMAX)
        quantize_graphs(graphs, out, chosen, calibration=Calibration(amax=amax, sha256="made up"))
    return load_bundle(out, check=False)
