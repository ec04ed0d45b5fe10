"""Measures the released model's shape: our graphs and engines, transformers on the same weights, and the floor.

Nothing is downloaded, and missing tools are skipped and listed. `--small` measures a reduced shape on the CPU.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bench import floor, results, shape
from bench.results import attempt
from bench.runner import ROUTINGS, DeviceRunner, HostRunner, Runner
from bench.transformers_side import TransformersRunner
from canvasrt.bundle import Bundle
from canvasrt.cli.options import Experts
from canvasrt.defaults import SLOTTED
from canvasrt.errors import CanvasError, UsageError
from canvasrt.extras import require
from canvasrt.machine import BUILDER_MODULES, gpus
from canvasrt.targets import TARGETS, Target
from canvasrt.types import Json

PROMPT_OF_GENERATION = 512
SIDES = (
    "onnxruntime",
    "tensorrt",
    "transformers",
    "transformers-compiled",
)
# A CPU has no CUDA graphs, and compiling takes minutes there for a meaningless figure.
SMALL_SIDES = ("onnxruntime", "tensorrt", "transformers")
ROUTING = (
    "the router's weights are random with variance 1 / inputs over normalised states, and tokens are random, so each "
    "token's experts are nearly a random choice"
)
Numbers = Annotated[str | None, typer.Option(metavar="N,N,…")]


def measure(
    small: Annotated[bool, typer.Option("--small", help="The reduced shape, on the CPU.")] = False,
    work: Annotated[Path | None, typer.Option(help="Keeps graphs for later runs.")] = None,
    sides: Annotated[str | None, typer.Option(help=f"Of {', '.join(SIDES)}.")] = None,
    precision: Annotated[
        Literal[shape.QUANTIZED] | None,  # type: ignore[valid-type]
        typer.Option(
            help="Quantize the engines' weights with a made-up calibration; other sides keep theirs.",
        ),
    ] = None,
    experts: Experts = SLOTTED,
    batches: Numbers = None,
    contexts: Numbers = None,
    steps: int | None = None,
    repeats: int | None = None,
    out: results.Out = None,
) -> None:
    """Measure passes, segments, whole generations and the floor. Results are written after each row."""
    if not gpus() and not small:
        small = True
        print("no GPU: measuring the reduced shape on the CPU (--small)", file=sys.stderr)
    lists = {"batches": batches, "contexts": contexts}
    chosen: dict[str, Any] = {k: tuple(map(int, v.split(","))) for k, v in lists.items() if v}
    numbers = {"steps": steps, "repeats": repeats}
    chosen |= {name: number for name, number in numbers.items() if number}
    wanted = replace(shape.SMALL if small else shape.FULL, **chosen)
    names = sides.split(",") if sides else SMALL_SIDES if small else SIDES
    if unknown := set(names) - set(SIDES):
        raise UsageError(f"unknown side {min(unknown)!r}", f"give one of {', '.join(SIDES)}")
    _check(names, small)
    folder = work or Path(tempfile.mkdtemp(prefix="canvasrt-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save = partial(results.write, out=out)
        figures = run(wanted, folder, small, names, precision, save, experts)
    finally:
        if work is None:
            shutil.rmtree(folder, ignore_errors=True)
    results.report(figures, out)


def _check(sides: Sequence[str], small: bool) -> None:
    """Raise the last side's error if none can run: files of the released shape take minutes to write."""
    makes = {
        "tensorrt": _target,
        "onnxruntime": lambda: small or _provider(),
    }
    refused = []
    for side in sides:
        try:
            makes.get(side, lambda: require("transformers.models.diffusion_gemma", "test"))()
        except CanvasError as error:
            refused.append(error)
    if len(refused) == len(sides):
        raise refused[-1]


def _provider() -> Any:
    from canvasrt.runtime.backends.onnxruntime_cuda import OrtCudaBackend

    return OrtCudaBackend()


def run(
    wanted: shape.Shape,
    folder: Path,
    small: bool,
    sides: Any,
    precision: str | None,
    save: Callable[[Json], None],
    experts: str = SLOTTED,
) -> Json:
    """Return all measurements of a shape, with files in `folder`. `save` gets the measurements so far after each
    row."""
    prepared = shape.prepare(wanted, folder)
    config = prepared.config
    served = shape.quantized(prepared, precision, folder) if precision else prepared
    rates = attempt(lambda: floor.rates(small, precision or "bf16"))
    _free()
    figures: Json = {
        "device": "CPU" if small else gpus()[0].name,
        "shape": asdict(wanted) | {"weight_bytes": prepared.weight_bytes},
        "engines": {
            "precision": precision,
            "experts": experts,
            "weight_bytes": served.weight_bytes,
            "calibration": "made up: no prompt was run",
        }
        if precision
        else None,
        "routing": ROUTING,
        "rates": rates,
        "floor, ms": []
        if "skipped" in rates
        else [{"batch": n} | floor.floor_ms(served, rates, n) for n in wanted.batches],
        "mean tokens per expert": config.canvas_length * config.top_k_experts / config.num_experts,
    }
    for name, make in _makers(prepared, served, folder, small, experts).items():
        if name in sides:
            print(f"measuring {name}", file=sys.stderr, flush=True)
            try:
                for title, row in measure_side(make(), wanted):
                    _add(figures, name, title, row)
                    save(figures)
            except Exception as error:  # as in `attempt`
                _add(figures, name, "side", results.skipped(error))
            _free()
            save(figures)
    return figures


def _add(figures: Json, side: str, title: str, row: Json) -> None:
    """Add a side's row to a table, and its failures to "not measured"."""
    failed = "skipped" in row
    figures.setdefault("not measured" if failed else title, []).append(
        {"side": side} | ({"what": title} if failed else {}) | row
    )


def measure_side(runner: Runner, wanted: shape.Shape) -> Iterator[tuple[str, Json]]:
    """Yield the rows of one side, each with its table."""
    tables = {
        "passes, ms": _passes(runner, wanted),
        "segments at batch 1, ms": _segments(runner, wanted),
        f"two blocks of {wanted.steps} steps": _generations(runner, wanted),
        "most tokens of an expert, by layer": _loads(runner, wanted.contexts[0]),
    }
    for title, rows in tables.items():
        for row in rows:
            yield title, row
    yield "device memory", {"bytes": runner.memory()}


def _passes(runner: Runner, wanted: shape.Shape) -> Iterator[Json]:
    """Yield denoising passes at every batch and context, with canvases of each routing."""

    def one(batch: int, context: int) -> Json:
        took = runner.pass_ms(batch, context, wanted.repeats)
        row = {"even": statistics.median(took), "min": min(took), "max": max(took)}
        for routing in ROUTINGS[1:]:
            if others := runner.pass_ms(batch, context, wanted.repeats, routing):
                row[routing] = statistics.median(others)
        return row

    for context in wanted.contexts:
        for batch in wanted.batches:
            yield {"batch": batch, "context": context} | attempt(partial(one, batch, context))


def _segments(runner: Runner, wanted: shape.Shape) -> Iterator[Json]:
    for context in wanted.contexts:
        if parts := attempt(partial(runner.segments_ms, 1, context, wanted.repeats)):
            yield {"context": context} | parts


def _generations(runner: Runner, wanted: shape.Shape) -> Iterator[Json]:
    """Yield whole requests of two blocks after a prompt, with all steps taken."""
    prompt = min(PROMPT_OF_GENERATION, *wanted.contexts)

    def one(batch: int) -> Json:
        runner.generate(batch, prompt, 2, wanted.steps)  # warm-up
        run = runner.generate(batch, prompt, 2, wanted.steps)
        seconds = wanted.steps * statistics.median(run.step_seconds)
        return {
            "tokens/s": run.tokens / run.seconds,
            "tokens/s of the steps alone": run.tokens / 2 / seconds,  # one block each
            "first tokens, ms": 1e3 * run.first_tokens,
        }

    for batch in wanted.batches:
        yield {"batch": batch, "prompt": prompt} | attempt(partial(one, batch))


def _loads(runner: Runner, context: int) -> Iterator[Json]:
    for routing in ROUTINGS:
        if runner.pass_ms(1, context, 1, routing):
            yield {"routing": routing, "tokens": runner.loads()}


def _free() -> None:
    """Release the device memory that the last side held."""
    gc.collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()


def _makers(
    prepared: shape.Prepared, served: shape.Prepared, folder: Path, small: bool, experts: str
) -> dict[str, Callable[[], Runner]]:
    """Return a function per side that makes it. Sides are made in turn, so that only one is in memory.

    `served`: the graphs from which engines are built; they may be quantized.
    """

    def onnxruntime() -> Runner:
        if small:
            from canvasrt.runtime.backends.onnxruntime import OrtBackend

            return HostRunner(prepared, OrtBackend())
        from canvasrt.runtime.backends.onnxruntime_cuda import OrtCudaBackend

        most = max(prepared.shape.batches)
        return DeviceRunner(prepared, OrtCudaBackend(rows_apart=False, max_batch=most))

    def tensorrt() -> Runner:
        backend, bundle = _engines(served, folder, experts)
        return DeviceRunner(served, backend, bundle)

    return {
        "onnxruntime": onnxruntime,
        "tensorrt": tensorrt,
        "transformers": lambda: TransformersRunner(prepared, static=False),
        "transformers-compiled": lambda: TransformersRunner(prepared, static=True),
    }


def _engines(prepared: shape.Prepared, folder: Path, experts: str) -> tuple[Any, Bundle]:
    """Return engines for this machine's GPU, built from the graphs, and the backend that runs them."""
    from canvasrt.build.options import BuildOptions
    from canvasrt.pipeline import build_bundle
    from canvasrt.runtime.backends.tensorrt import TensorRTBackend

    target, wanted = _target(), prepared.shape
    precision = prepared.graphs.manifest.options.get("precision", wanted.precision)
    context, batch = wanted.max_context, max(wanted.batches)
    bundle = build_bundle(
        prepared.graphs.path,
        target,
        # One folder keeps the engines of several runs.
        folder / f"{wanted.name}-engines-{precision}-{context}-{batch}-{experts}",
        BuildOptions(precision, max_context=context, max_batch=batch, experts=experts),
    )
    assert bundle.manifest.target is not None
    return TensorRTBackend(bundle.manifest.target, rows_apart=False), bundle


def _target() -> Target:
    """Return the target for this machine's GPU."""
    if not gpus():
        raise CanvasError("TensorRT needs a GPU, and this machine has none", "see docs/hardware.md")
    here = gpus()[0]
    found = [target for target in TARGETS if target.capability == here.capability]
    if not found:
        raise CanvasError(
            f"no target has the capability of {here.name}",
            "`canvasrt targets` lists the capabilities",
        )
    require(*BUILDER_MODULES[found[0].builder])
    # If two targets share a capability, the one with more memory refuses less.
    return max(found, key=lambda target: target.memory or 0)
