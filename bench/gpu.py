"""Measures the released model's shape on this machine's GPU: passes of our graphs and engines, passes of transformers
with the same weights, and the floor.

Nothing is downloaded, and missing tools are skipped and listed.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bench import floor, results, shape
from bench.results import attempt
from bench.runner import ROUTINGS, DeviceRunner
from bench.transformers_side import TransformersRunner
from canvasrt.bundle import Bundle
from canvasrt.cli.options import Experts
from canvasrt.defaults import SLOTTED
from canvasrt.errors import CanvasError, UsageError
from canvasrt.extras import require
from canvasrt.machine import BUILDER_MODULES, gpus
from canvasrt.targets import TARGETS, Target
from canvasrt.types import Json

RELEASED = shape.Shape("released", layers=6, copies=5)
SIDES = ("onnxruntime", "tensorrt", "transformers")
ROUTING = (
    "the router's weights are random with variance 1 / inputs over normalised states, and tokens are random, so each "
    "token's experts are nearly a random choice"
)
Numbers = Annotated[str, typer.Option(metavar="N,N,…")]


@dataclass(frozen=True)
class Sweep:
    """The passes to measure: every batch at every context, `repeats` times."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int

    @property
    def max_context(self) -> int:
        return max(self.contexts) + 1024


def measure(
    work: Annotated[
        Path | None, typer.Option(help="A folder that keeps graphs for later runs.")
    ] = None,
    sides: Annotated[str, typer.Option(metavar="SIDE,SIDE,…")] = ",".join(SIDES),
    precision: Annotated[
        Literal[shape.QUANTIZED] | None,  # type: ignore[valid-type]
        typer.Option(
            help="Quantize the engines' weights with a made-up calibration. Graphs and transformers stay unquantized.",
        ),
    ] = None,
    experts: Experts = SLOTTED,
    batches: Numbers = "1,2,4,8",
    contexts: Numbers = "512,4096,32768",
    repeats: int = 20,
    out: results.Out = None,
) -> None:
    """Measure passes and the floor. Results are written after every row."""
    names = sides.split(",")
    if unknown := set(names) - set(SIDES):
        raise UsageError(f"unknown side {min(unknown)!r}", f"give one of {', '.join(SIDES)}")
    sizes = (tuple(map(int, each.split(","))) for each in (batches, contexts))
    _check(names)
    folder = work or Path(tempfile.mkdtemp(prefix="canvasrt-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save = partial(results.write, out=out)
        figures = run(RELEASED, Sweep(*sizes, repeats), folder, names, precision, save, experts)
    finally:
        if work is None:
            shutil.rmtree(folder, ignore_errors=True)
    results.report(figures, out)


def _check(sides: Sequence[str]) -> None:
    """Raise the last side's error if no side can run. This comes first, since writing the files takes minutes."""
    needs = {
        "tensorrt": _target,
        "onnxruntime": _provider,
        "transformers": lambda: require("transformers.models.diffusion_gemma", "test"),
    }
    refused = []
    for side in sides:
        try:
            _gpu()
            needs[side]()
        except CanvasError as error:
            refused.append(error)
    if len(refused) == len(sides):
        raise refused[-1]


def run(
    wanted: shape.Shape,
    sweep: Sweep,
    folder: Path,
    sides: Sequence[str],
    precision: str | None,
    save: Callable[[Json], None],
    experts: str = SLOTTED,
) -> Json:
    """Return all measurements of a shape, with files in `folder`. After every row, `save` gets the measurements so
    far."""
    prepared = shape.prepare(wanted, folder)
    served = shape.quantized(prepared, precision, folder) if precision else prepared
    rates = attempt(lambda: floor.rates(precision or "bf16"))
    _free()
    figures: Json = {
        "shape": asdict(wanted) | asdict(sweep) | {"weight_bytes": prepared.weight_bytes},
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
        else [{"batch": n} | floor.floor_ms(served, rates, n) for n in sweep.batches],
    }

    def onnxruntime() -> DeviceRunner:
        return DeviceRunner(prepared, _provider(max(sweep.batches)), sweep.max_context)

    def tensorrt() -> DeviceRunner:
        backend, bundle = _engines(served, sweep, folder, experts)
        return DeviceRunner(served, backend, sweep.max_context, bundle)

    # One side is created at a time, so that only one is in memory.
    makers: dict[str, Callable[[], DeviceRunner | TransformersRunner]] = {
        "onnxruntime": onnxruntime,
        "tensorrt": tensorrt,
        "transformers": lambda: TransformersRunner(prepared),
    }
    for name in sides:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        try:
            for title, row in measure_side(makers[name](), sweep):
                _add(figures, name, title, row)
                save(figures)
        except Exception as error:  # any exception, as in `attempt`
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


def measure_side(
    runner: DeviceRunner | TransformersRunner, sweep: Sweep
) -> Iterator[tuple[str, Json]]:
    """Yield pairs of a table's title and a row of one side: times of passes for each routing, and memory."""

    def one(batch: int, context: int) -> Json:
        took = runner.pass_ms(batch, context, sweep.repeats)
        row = {"even": statistics.median(took), "min": min(took), "max": max(took)}
        for routing in ROUTINGS[1:]:
            if others := runner.pass_ms(batch, context, sweep.repeats, routing):
                row[routing] = statistics.median(others)
        return row

    for context in sweep.contexts:
        for batch in sweep.batches:
            row = attempt(partial(one, batch, context))
            yield "passes, ms", {"batch": batch, "context": context} | row
    yield "device memory", {"bytes": runner.memory()}


def _free() -> None:
    """Release the device memory that the last side held."""
    gc.collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()


def _provider(max_batch: int = 1) -> Any:
    from canvasrt.runtime.backends.onnxruntime_cuda import OrtCudaBackend

    return OrtCudaBackend(rows_apart=False, max_batch=max_batch)


def _engines(
    prepared: shape.Prepared, sweep: Sweep, folder: Path, experts: str
) -> tuple[Any, Bundle]:
    """Return engines for this machine's GPU, built from the graphs, and the backend that runs them."""
    from canvasrt.build.options import BuildOptions
    from canvasrt.pipeline import build_bundle
    from canvasrt.runtime.backends.tensorrt import TensorRTBackend

    wanted, context, batch = prepared.shape, sweep.max_context, max(sweep.batches)
    precision = prepared.graphs.manifest.options.get("precision", wanted.precision)
    bundle = build_bundle(
        prepared.graphs.path,
        _target(),
        # Engines with different options have different folders.
        folder / f"{wanted.name}-engines-{precision}-{context}-{batch}-{experts}",
        BuildOptions(precision, max_context=context, max_batch=batch, experts=experts),
    )
    assert bundle.manifest.target is not None
    return TensorRTBackend(bundle.manifest.target, rows_apart=False), bundle


def _gpu() -> Any:
    """Return this machine's first GPU."""
    if not gpus():
        raise CanvasError("this machine has no GPU", "see docs/hardware.md")
    return gpus()[0]


def _target() -> Target:
    """Return the target for this machine's GPU."""
    here = _gpu()
    found = [target for target in TARGETS if target.capability == here.capability]
    if not found:
        raise CanvasError(
            f"no target has the capability of {here.name}",
            "`canvasrt targets` lists the capabilities",
        )
    require(*BUILDER_MODULES[found[0].builder])
    # If several targets share a capability, the one with the most memory refuses the fewest builds.
    return max(found, key=lambda target: target.memory or 0)
