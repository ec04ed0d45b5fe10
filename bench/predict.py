"""Predicts times of the released shape, by recipe, GPU, batch and context, from the builder's kernel lists.

    python -m bench.predict -o predicted --work /path/with/60GB

Needs no GPU. Writes a random checkpoint of three layers, quantizes it by each recipe with a made-up calibration, and
builds its engines. The second layer stands for the other sliding ones; `--layers 6` builds whole segments instead,
which takes twice the memory. The tables are `DIR/predicted.json` and `DIR/predicted.md`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from canvasrt.types import Json

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import shape
from canvasrt.build.fit import released_memory
from canvasrt.build.plan import BuildOptions
from canvasrt.build.precision import Precision, parse_precision
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.checkpoints.released import released_model
from canvasrt.kernels.predict import Predictor
from canvasrt.kernels.rates import GpuRates, find_gpu
from canvasrt.pass_shapes import capacities, round_up, usual_capacity
from canvasrt.pipeline import build_bundle
from canvasrt.targets import Target, find_target

# How often each layer counts: every sixth of the released 30 layers is a full one.
SEGMENTS = 5
REPEAT = {
    3: {None: SEGMENTS, 0: SEGMENTS, 1: 4 * SEGMENTS, 2: SEGMENTS},
    6: dict.fromkeys((None, *range(6)), SEGMENTS),
}
# All are built for one target, with every format and enough memory for the longest contexts. Its kernels stand for
# the other GPUs'.
BUILT_FOR = "rtx-pro-6000"
PLAN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("nvfp4", ("rtx-5090", "rtx-pro-6000", "dgx-spark")),
    ("nvfp4-mixed", ("rtx-5090", "rtx-pro-6000", "dgx-spark", "b200", "dgx-station")),
    ("nvfp4-experts", ("rtx-5090", "rtx-pro-6000", "dgx-spark")),
    (
        "fp8",
        (
            "rtx-4090",
            "rtx-6000-ada",
            "l40s",
            "rtx-5090",
            "rtx-pro-6000",
            "dgx-spark",
            "h100",
            "h200",
        ),
    ),
    ("bf16", ("rtx-4090", "rtx-pro-6000", "dgx-spark", "a100", "h100", "h200", "b200")),
    (
        "int4",
        (
            "rtx-3090",
            "rtx-a6000",
            "rtx-4080",
            "rtx-4090",
            "l4",
            "rtx-6000-ada",
            "l40s",
            "rtx-5080",
            "rtx-5090",
            "rtx-pro-6000",
            "dgx-spark",
            "a100",
            "h100",
            "h200",
            "b200",
            "dgx-station",
        ),
    ),
)
LONGEST_CONTEXT = 262_144


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench.predict", description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for graphs and engines")
    parser.add_argument("--recipes", default=",".join(name for name, _ in PLAN))
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--contexts", default="1024,32768,262144")
    parser.add_argument("--layers", type=int, choices=sorted(REPEAT), default=3)
    options = parser.parse_args(arguments)
    # Engines of tens of gigabytes, which nothing else uses.
    os.environ.setdefault("CANVASRT_CACHE", str(options.work / "cache"))
    wanted = options.recipes.split(",")
    rows: list[Json] = []
    for recipe, gpus in PLAN:
        if recipe in wanted:
            print(f"building {recipe}", file=sys.stderr, flush=True)
            repeat, contexts = REPEAT[options.layers], _numbers(options.contexts)
            batches = _numbers(options.batches)
            for batch in batches:
                # Engines take one canvas or a full batch, whose number of canvases is fixed.
                full = (
                    min((each for each in batches if each > 1), default=1) if batch == 1 else batch
                )
                bundle = engines(recipe, options.layers, options.work, full)
                rows += predictions(Predictor(bundle, repeat), recipe, gpus, batch, contexts)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "predicted.json").write_text(json.dumps(rows, indent=2) + "\n")
    (options.out / "predicted.md").write_text(markdown(rows))
    print(markdown(rows), end="")
    return 0


def engines(recipe: str, layers: int, work: Path, batch: int) -> Bundle:
    """Return a recipe's engines for so many canvases; make what `work` lacks."""
    out = work / f"engines-{recipe}-{batch}"
    if out.exists():
        return load_bundle(out, kind="engines", check=False)
    work.mkdir(parents=True, exist_ok=True)
    made = shape.Shape("released", layers, 1, "bf16", (), (), 0, 0)
    prepared = shape.prepare(made, work)
    if recipe != "bf16":
        prepared = shape.quantized(prepared, recipe, work)
    return build_bundle(
        prepared.graphs.path,
        BUILT_FOR,
        out,
        BuildOptions(max_context=LONGEST_CONTEXT, max_batch=batch),
    )


def predictions(
    predictor: Predictor,
    recipe: str,
    gpus: Sequence[str],
    batch: int,
    contexts: Sequence[int],
) -> Iterator[Json]:
    """Yield milliseconds of passes and the floor, with nearly even routing and with half a canvas of padding."""
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
        }


@cache
def fits(recipe: str, target: Target, batch: int, context: int) -> str:
    """Return whether such requests fit the target's memory: "yes", "no", or "without images"; as `build --dry-run`."""
    most = context + released_model().canvas_length
    way, need = released_memory(_precision(recipe), target, most, batch)
    if target.memory is not None and need.total > target.memory:
        return "no"
    return "yes" if way.sees else "without images"


@cache
def _precision(recipe: str) -> Precision:
    return parse_precision(recipe)


def padded_seconds(predictor: Predictor, gpu: GpuRates, batch: int, context: int) -> float:
    """Return the seconds for canvases that are half padding: a batch overflows its slots, so each canvas runs alone.

    All of the padding goes to the same experts, which get some of the other tokens, too.
    """
    model = predictor.model
    padding = model.canvas_length // 2
    load = padding + usual_capacity(model, model.canvas_length - padding)
    capacity = round_up(load, capacities(model))
    return batch * predictor.denoise(gpu, 1, context, capacity).seconds


def markdown(rows: Sequence[Json]) -> str:
    """Return one table per batch size, with one row per recipe and GPU: the pass, in floors, and the padded one."""
    contexts = sorted({row["context"] for row in rows})
    parts = []
    for batch in sorted({row["batch"] for row in rows}):
        heads = ["recipe", "GPU", *(f"context {each:,}" for each in contexts)]
        lines = [
            f"| {' | '.join(heads)} |",
            f"| --- | --- |{' --- |' * len(contexts)}",
        ]
        held = {
            (row["recipe"], row["gpu"], row["context"]): row
            for row in rows
            if row["batch"] == batch
        }
        for recipe, gpu in dict.fromkeys((row["recipe"], row["gpu"]) for row in held.values()):
            cells = (_cell(held[recipe, gpu, context]) for context in contexts)
            lines.append(f"| {recipe} | {gpu} | {' | '.join(cells)} |")
        parts.append(f"Batch {batch}:\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _cell(row: Json) -> str:
    ratio = row["ms"] / row["floor_ms"]
    text = f"{row['ms']:.1f} ({ratio:.1f} ×), {row['padded_ms']:.1f}"
    return {"yes": text, "without images": f"{text} †", "no": f"*{text}*"}[row["fits"]]


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
