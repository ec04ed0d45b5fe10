"""Runs one measurement: `python -m bench NAME`. `python -m bench` lists them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import typer

from canvasrt.errors import CanvasError, UsageError

# Each measurement is the function `measure` of a module; its parameters are the options.
MEASUREMENTS = {
    "against": ("bench.against", "passes and answers on this CPU, compared with transformers"),
    "answers": (
        "bench.answers",
        "reads and constrained answers, compared with ordinary denoising passes",
    ),
    "batch": (
        "bench.batch",
        "a file of requests in this process, compared with 64 clients over HTTP",
    ),
    "build": ("bench.build", "seconds, peak memory and bytes of an export and a build"),
    "calibrated": ("bench.calibrated", "a build from a bf16 checkpoint, compared with its plan"),
    "checkpoint": ("bench.checkpoint", "no measurement: a random checkpoint of a real shape"),
    "cpu": ("bench.cpu", "a denoising pass on this CPU, as a share of its matrix rate"),
    "floor": ("bench.floor", "rates of copies, matrix products and launches on this GPU"),
    "gpu": ("bench.gpu", "passes of the released shape: engines, graphs, transformers, the floor"),
    "hour": (
        "bench.hour",
        "all measurements that need a GPU, in order; may be interrupted at any minute",
    ),
    "image-demo": (
        "bench.image_demo",
        "no measurement: the demo in a container, `make image-demo`",
    ),
    "picture": ("bench.picture", "no measurement: the README's picture of the page"),
    "predict": (
        "bench.predict",
        "predicted passes on GPUs that this machine lacks, from the builder's kernels",
    ),
    "probe": ("bench.probe", "what runs on this machine's GPU, in each tool's own words"),
    "questions": (
        "bench.questions",
        "the demo's held-out questions: right answers, and what settings change",
    ),
    "recipes": ("bench.recipes", "the quality of the demo under each recipe"),
    "rows": ("bench.rows", "the kernels over sorted rows on this GPU, checked against NumPy"),
    "serving": ("bench.serving", "what gRPC and HTTP add to a first token and to an answer"),
    "tables": ("bench.tables", "no measurement: the pages' tables, from bench/results/"),
    "train-demo": ("bench.demo.train", "no measurement: trains the bundled demo checkpoints"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement that the command line names; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in MEASUREMENTS:
        for name, (_, what) in MEASUREMENTS.items():
            print(f"{name:12} {what}")
        return 0 if not given or given[0] in ("-h", "--help") else 2
    # CUDA then numbers GPUs as nvidia-smi does. The results name the GPUs by nvidia-smi.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(importlib.import_module(MEASUREMENTS[given[0]][0]).measure)
    try:
        app(given[1:], prog_name=f"python -m bench {given[0]}")
    except (CanvasError, UsageError) as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 1
    except SystemExit as done:
        return int(done.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
