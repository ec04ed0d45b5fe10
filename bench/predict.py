"""Predicts how long passes of the released shape take, by recipe, GPU, batch and context, from lists of kernels.

Needs no GPU. Writes a random checkpoint of three layers, quantizes it by each recipe with a made-up calibration, and
builds its engines, which list their kernels. The second layer's time counts for all further sliding layers.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from bench import results, shape
from canvasrt.build.fit import released_memory
from canvasrt.build.options import BuildOptions, Precision, parse_precision
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.checkpoints.released import released_model
from canvasrt.defaults import SLOTTED
from canvasrt.expert_slots import capacities, usual_capacity
from canvasrt.pass_shapes import round_up
from canvasrt.pipeline import build_bundle
from canvasrt.roofline.predict import Predictor
from canvasrt.roofline.rates import GpuRates, find_gpu
from canvasrt.targets import Target, find_target
from canvasrt.types import Json

# How often each layer's time counts, by layer: every sixth of the released 30 layers is a full one.
SEGMENTS = 5
REPEAT: dict[int | None, int] = {None: SEGMENTS, 0: SEGMENTS, 1: 4 * SEGMENTS, 2: SEGMENTS}
# All engines are built for this target, which has every format and enough memory for the longest contexts. The
# predictions assume that other GPUs run the same kernels.
BUILT_FOR = "rtx-pro-6000"
_BLACKWELL = ("rtx-5090", "rtx-pro-6000", "dgx-spark")
_ADA = ("rtx-4090", "rtx-6000-ada", "l40s")
PLAN: dict[str, tuple[str, ...]] = {
    "nvfp4": _BLACKWELL,
    "nvfp4-mixed": (*_BLACKWELL, "b200", "dgx-station"),
    "nvfp4-experts": _BLACKWELL,
    "fp8": (*_ADA, *_BLACKWELL, "h100", "h200"),
    "bf16": ("rtx-4090", "rtx-pro-6000", "dgx-spark", "a100", "h100", "h200", "b200"),
    "int4-mixed": ("l4", *_ADA, "h100"),
    "int4": (
        *("rtx-3090", "rtx-a6000", "rtx-4080", "l4", "rtx-5080", *_ADA, *_BLACKWELL),
        *("a100", "h100", "h200", "b200", "dgx-station"),
    ),
}
LONGEST_CONTEXT = 262_144


def measure(
    work: Annotated[Path, typer.Option(help="The folder for graphs and engines: up to 60 GB.")],
    recipes: str = ",".join(PLAN),
    batches: str = "1,4,8",
    contexts: str = "1024,32768,262144",
    experts: Annotated[str, typer.Option(help="As in `canvasrt build`.")] = SLOTTED,
    out: results.Out = None,
) -> None:
    """Predict milliseconds of denoising passes, for even routing and for canvases that are half padding."""
    # A separate cache, since the engines take tens of gigabytes and nothing else uses them.
    os.environ.setdefault("CANVASRT_CACHE", str(work / "cache"))
    rows: list[Json] = []
    for recipe in recipes.split(","):
        print(f"building {recipe}", file=sys.stderr, flush=True)
        sizes = _numbers(batches)
        for batch in sizes:
            # Engines accept one canvas or exactly a full batch, so engines for a batch also serve one canvas.
            full = min((each for each in sizes if each > 1), default=1) if batch == 1 else batch
            predictor = Predictor(engines(recipe, work, full, experts), REPEAT)
            rows += predictions(predictor, recipe, PLAN[recipe], batch, _numbers(contexts))
    results.report({"experts": experts, "passes": rows}, out)


def engines(recipe: str, work: Path, batch: int, experts: str = SLOTTED) -> Bundle:
    """Return a recipe's engines for this number of canvases; build them if `work` lacks them."""
    out = work / f"engines-{recipe}-{batch}-{experts}"
    if out.exists():
        return load_bundle(out, kind="engines", check=False)
    work.mkdir(parents=True, exist_ok=True)
    prepared = shape.prepare(shape.Shape("released", shape.FEW_LAYERS, 1), work)
    if recipe != "bf16":
        prepared = shape.quantized(prepared, recipe, work)
    return build_bundle(
        prepared.graphs.path,
        BUILT_FOR,
        out,
        BuildOptions(max_context=LONGEST_CONTEXT, max_batch=batch, experts=experts),
    )


def predictions(
    predictor: Predictor,
    recipe: str,
    gpus: Sequence[str],
    batch: int,
    contexts: Sequence[int],
) -> Iterator[Json]:
    """Yield milliseconds of passes and of the floor, for nearly even routing and for canvases that are half padding."""
    for name, context in itertools.product(gpus, contexts):
        gpu = find_gpu(name)
        even = predictor.denoise(gpu, batch, context)
        yield {
            "recipe": recipe,
            "gpu": name,
            "fits": fits(recipe, find_target(name), batch, context),
            "batch": batch,
            "context": context,
            "capacity": even.sizes.capacity,
            "ms": 1e3 * even.seconds,
            "floor_ms": 1e3 * even.floor_seconds,
            "padded_ms": 1e3 * padded_seconds(predictor, gpu, batch, context),
            "kernels": len(even.rows),
            "parts": {part: 1e3 * value for part, value in even.parts().items()},
            "block_ms": 1e3 * predictor.block_seconds(gpu, batch, context),
            "reads": reads_per_second(predictor, gpu, batch, context),
        }


def reads_per_second(
    predictor: Predictor, gpu: GpuRates, batch: int, context: int
) -> dict[str, float]:
    """Return decisions per second. A decision is one read after a prompt as long as a canvas: on the shortest canvas in
    own passes, and on whole canvases in passes of `batch`. Reads run no head, since the host scores their few
    labels."""
    prompt = predictor.encode(gpu, context).seconds
    short = predictor.encode(gpu, context, predictor.passes.lengths[0]).seconds
    rows = predictor.denoise(gpu, batch, context).rows
    shared = sum(row.seconds for row in rows if row.segment != "head")
    return {"short": 1 / (prompt + short), "whole": batch / (batch * prompt + shared)}


@cache
def fits(recipe: str, target: Target, batch: int, context: int) -> str:
    """Return whether `batch` requests fit the target's memory: "yes", "no", or "without images". `build --dry-run`
    reports the same."""
    most = context + released_model().canvas_length
    way, need = released_memory(_precision(recipe), target, most, batch)
    if target.memory is not None and need.total > target.memory:
        return "no"
    return "yes" if way.sees else "without images"


@cache
def _precision(recipe: str) -> Precision:
    return parse_precision(recipe)


def padded_seconds(predictor: Predictor, gpu: GpuRates, batch: int, context: int) -> float:
    """Return the seconds for canvases that are half padding. They overflow a batch's slots, so each canvas runs alone.

    All of the padding goes to the same experts, which also get some of the other tokens. Sorted rows take the same time
    for every routing.
    """
    if predictor.experts != SLOTTED:
        return predictor.denoise(gpu, batch, context).seconds
    model = predictor.model
    padding = model.canvas_length // 2
    load = padding + usual_capacity(model, model.canvas_length - padding)
    capacity = round_up(load, capacities(model))
    return batch * predictor.denoise(gpu, 1, context, capacity).seconds


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]
