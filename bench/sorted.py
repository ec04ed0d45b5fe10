"""Predicts denoising passes whose experts run over sorted rows between engines.

    python -m bench.sorted --work /path/with/8GB --recipe int4 --target rtx-4090 --gpu rtx-4090

Needs no GPU. Builds engines at the released widths, with three layers and few experts; their kernels are counted for 30
layers, and those between them for 128 experts. Prints milliseconds of all body segments with even, skewed and padded
routing as in `bench.slots`, without the head. `bench.predict` has the standard form.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.few_experts import few_experts
from bench.predict import LONGEST_CONTEXT, SEGMENTS
from bench.slots import DRAWS, LAYERS, Loads, even, padded, skewed
from canvasrt.build.plan import BuildOptions
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.checkpoints.released import released_model
from canvasrt.defaults import LAYERS_PER_SEGMENT, SORTED
from canvasrt.kernels.cost import SORTED_PRODUCT, Cost, costs, is_own
from canvasrt.kernels.parse import Kernel
from canvasrt.kernels.predict import Predictor
from canvasrt.kernels.rates import GpuRates, find_gpu
from canvasrt.pass_shapes import BLOCK_ROWS
from canvasrt.pipeline import build_bundle

# That share a pass in these engines.
MOST_CANVASES = 4
# How often each piece counts. Each computes the masks that it needs.
PIECES = {0: SEGMENTS, 1: 4 * SEGMENTS, 2: SEGMENTS, 3: SEGMENTS}


def engines(recipe: str, target: str, work: Path) -> Bundle:
    """Return engines and the kernels between them; make what `work` lacks."""
    out = work / f"engines-{recipe}-{target}"
    if out.exists():
        return load_bundle(out, kind="engines", check=False)
    options = BuildOptions(max_context=LONGEST_CONTEXT, max_batch=MOST_CANVASES, experts=SORTED)
    return build_bundle(few_experts(recipe, work), target, out, options)


class SortedPasses:
    """Body segments in pieces. The kernels between them are counted at the released sizes."""

    def __init__(
        self, bundle: Bundle, gpu: GpuRates, batch: int, context: int, share: float
    ) -> None:
        own = {"reached": gpu.reached * share, "arithmetic": gpu.arithmetic * share}
        self._own = replace(gpu, **own)
        rows = Predictor(bundle).denoise(gpu, batch, context).rows
        bodies = [row for row in rows if row.segment != "head"]
        self._rest = sum(
            (self._seconds(row.cost) if is_own(row.kernel) else row.seconds)
            * PIECES[piece_of(row.kernel)]
            for row in bodies
            if row.kernel.kind != SORTED_PRODUCT
        )
        self._ours = [
            r.kernel for r in bodies if r.kernel.kind == SORTED_PRODUCT and r.place.layer == 1
        ]
        self.kernels = sum(PIECES[piece_of(row.kernel)] for row in bodies)

    def seconds(self, loads: Loads) -> float:
        return self._rest + sum(self._layer(layer) for layer in loads)

    def _layer(self, loads: Loads) -> float:
        """Return the seconds of one layer's products: all rows of blocks in use are computed, those with tokens read and
        written, and weights read once if their expert has any."""
        rows, used = int((-(-loads // BLOCK_ROWS)).sum()) * BLOCK_ROWS, int((loads > 0).sum())
        sizes = {"sorted_rows": rows, "routed_rows": int(loads.sum())}
        found = costs([_with_experts(each, used) for each in self._ours], sizes)
        return sum(map(self._seconds, found))

    def _seconds(self, cost: Cost) -> float:
        """Return the seconds of a kernel of our own."""
        return self._own.seconds(cost.moved, cost.operations, cost.format)


def piece_of(kernel: Kernel) -> int:
    """Return the piece that a kernel is in, or behind."""
    found = [re.search(r"@(\d+)$|^layers\.(\d+)\.experts", each.name) for each in kernel.tensors]
    first = next(each for each in found if each)
    return int(first[1] or first[2])


def _with_experts(kernel: Kernel, count: int) -> Kernel:
    constants = (replace(each, dims=(count, *each.dims[1:])) for each in kernel.constants)
    return replace(kernel, constants=tuple(constants))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench.sorted", description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="a folder for graphs and engines")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--target", required=True, help="what the engines are built for")
    parser.add_argument("--gpu", required=True, action="append", help="whose rates; several times")
    parser.add_argument("--batch", type=int, default=1, choices=(1, MOST_CANVASES), help="canvases")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--share",
        type=float,
        default=1.0,
        help="of the builder's kernels' rates, what those over sorted rows reach; default: all",
    )
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CANVASRT_CACHE", str(options.work / "cache"))
    model = released_model()
    tokens = replace(model, canvas_length=options.batch * model.canvas_length)
    assert len(model.layers) == LAYERS == SEGMENTS * LAYERS_PER_SEGMENT
    print("| GPU | even | skewed | padded | kernels |\n| --- | ---: | ---: | ---: | ---: |")
    bundle = engines(options.recipe, options.target, options.work)
    for gpu in options.gpu:
        passes = SortedPasses(bundle, find_gpu(gpu), options.batch, options.context, options.share)
        cells = []
        for routing in (even, skewed, padded):
            rng = np.random.default_rng(0)
            drawn = [passes.seconds(routing(tokens, rng)) for _ in range(DRAWS)]
            cells.append(f"{1e3 * np.mean(drawn):.1f}")
        print(f"| {gpu} | {' | '.join(cells)} | {passes.kernels:,} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
