"""Measures the whole model's shape: our graphs and engines, transformers on the same weights, and
the floor.

    python -m bench.gpu -o results            on a GPU: the released shape, 30 layers
    python -m bench.gpu --small -o results    anywhere: a reduced shape, to check the script

Nothing is downloaded. Missing tools are skipped and listed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import experts, floor, measure, report, shape
from bench.reference import TransformersRunner
from bench.runner import DeviceRunner, HostRunner, Runner
from canvasrt.bundle import Bundle
from canvasrt.errors import CanvasError, UsageError
from canvasrt.extras import require, version
from canvasrt.machine import BUILDER_MODULES, gpus
from canvasrt.targets import TARGETS, Target
from canvasrt.types import Json

Make = Callable[[], Any]

DISTRIBUTIONS = (
    "canvasrt",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx",
    "torch",
    "transformers",
    "cuda-bindings",
)
ROUTING = (
    "Routing: the router's weights are random with variance 1 / inputs over normalised states, and tokens are "
    "random, so each token's experts are nearly a random choice."
)
SIDES = (
    "onnxruntime",
    "onnxruntime-graphs",  # passes as CUDA graphs
    "tensorrt",
    "transformers",
    "transformers-compiled",
)
# A CPU has no CUDA graphs, and compiling takes minutes there for a meaningless figure.
SMALL_SIDES = ("onnxruntime", "tensorrt", "transformers")


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    small = options.small or not gpus()
    if small and not options.small:
        print(
            "this machine has no GPU: measuring the reduced shape on the CPU (--small)",
            file=sys.stderr,
        )
    wanted = _shape(options, small)
    folder = options.work or Path(tempfile.mkdtemp(prefix="canvasrt-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python -m bench.gpu", *(arguments or sys.argv[1:])])

    def save(data: Json) -> None:
        report.write(data | {"command": command}, options.out)

    try:
        sides = options.sides.split(",") if options.sides else SMALL_SIDES if small else SIDES
        run(wanted, folder, small, sides, options.precision, save)
    except (CanvasError, UsageError) as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 1
    finally:
        if options.work is None:
            shutil.rmtree(folder, ignore_errors=True)
    for name in report.FILES:
        print(options.out / name)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-results"))
    parser.add_argument(
        "--small", action="store_true", help="measure the reduced shape, on the CPU"
    )
    parser.add_argument("--work", type=Path, help="folder that keeps graphs for later runs")
    parser.add_argument(
        "--sides", help=f"sides to measure, separated by commas: {', '.join(SIDES)}"
    )
    parser.add_argument(
        "--precision",
        choices=shape.QUANTIZED,
        help="quantize the engines' weights with a made-up calibration; other sides keep the shape's own",
    )
    for name in ("batches", "contexts"):
        parser.add_argument(f"--{name}", help="numbers separated by commas")
    for name in ("steps", "repeats", "copies"):
        parser.add_argument(f"--{name}", type=int)
    return parser.parse_args(arguments)


def _shape(options: argparse.Namespace, small: bool) -> shape.Shape:
    base = shape.SMALL if small else shape.FULL
    lists: dict[str, Any] = {
        name: tuple(int(each) for each in getattr(options, name).split(","))
        for name in ("batches", "contexts")
        if getattr(options, name)
    }
    numbers: dict[str, Any] = {
        name: getattr(options, name) for name in ("steps", "repeats", "copies")
    }
    return replace(base, **lists, **{name: n for name, n in numbers.items() if n})


def run(
    wanted: shape.Shape,
    folder: Path,
    small: bool,
    sides: Sequence[str],
    precision: str | None = None,
    save: Callable[[Json], None] = lambda data: None,
) -> Json:
    """Return all measurements of a shape, with files in `folder`. `save` gets the results so far
    after each side."""
    if unknown := set(sides) - set(SIDES):
        raise UsageError(f"unknown side {min(unknown)!r}", f"give one of {', '.join(SIDES)}")
    prepared = shape.prepare(wanted, folder)
    config = prepared.config
    served = shape.quantized(prepared, precision, folder) if precision else prepared
    rates = measure.attempt(lambda: floor.rates(small, precision or "bf16"))
    _free()
    makers = {
        name: make
        for name, make in _makers(prepared, served, folder, small).items()
        if name in sides
    }
    data: Json = {
        "date": datetime.date.today().isoformat(),
        "device": "CPU" if small else gpus()[0].name,
        "driver": None if small else gpus()[0].driver,
        "versions": {name: version(name) for name in DISTRIBUTIONS}
        | ({} if small else {"driver": gpus()[0].driver}),
        "shape": asdict(wanted),
        "weight_bytes": prepared.weight_bytes,
        "rates": rates,
        "floor": {}
        if "skipped" in rates
        else {str(b): floor.floor_ms(served, rates, b) for b in wanted.batches},
        "engines": {
            "precision": precision,
            "weight_bytes": served.weight_bytes,
            "calibration": "a made-up calibration: no prompt was run",
        }
        if precision
        else None,
        "routing": ROUTING,
        "mean_load": config.canvas_length * config.top_k_experts / config.num_experts,
        "sides": {},
        "experts": {},
    }
    for name, make in makers.items():
        print(f"measuring {name}", file=sys.stderr, flush=True)
        data["sides"][name] = measure.attempt(partial(_side, make, wanted))
        _free()
        save(data)
    for name, make in _mixtures(prepared, folder, small).items():
        if name in sides:
            print(f"measuring experts alone, {name}", file=sys.stderr, flush=True)
            data["experts"][name] = measure.attempt(partial(_experts, make, wanted, config))
            _free()
    save(data)
    return data


def _side(make: Callable[[], Runner], wanted: shape.Shape) -> Json:
    return measure.side(make(), wanted)


def _free() -> None:
    """Release what the last side held on the device."""
    gc.collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()


def _experts(make: Callable[[], experts.ExpertLayer], wanted: shape.Shape, config: Any) -> Json:
    mixture = make()
    counts = [batch * config.canvas_length for batch in wanted.batches]
    return {str(n): experts.measure_experts(mixture, n, wanted.repeats) for n in counts}


def _makers(
    prepared: shape.Prepared, served: shape.Prepared, folder: Path, small: bool
) -> dict[str, Callable[[], Runner]]:
    """Return what makes each side. Sides are made in turn, so that only one is in memory.

    `served` is what engines are built from, which may be quantized.
    """

    def onnxruntime() -> Runner:
        if small:
            from canvasrt.runtime.backends.onnxruntime import OrtBackend

            return HostRunner(prepared, OrtBackend())
        return DeviceRunner("canvasrt, ONNX Runtime on CUDA", prepared, _cuda(prepared.shape))

    def graphs() -> Runner:
        if small:
            raise CanvasError("CUDA graphs need a GPU", "leave the side out")
        return DeviceRunner(
            "canvasrt, ONNX Runtime on CUDA, CUDA graphs", prepared, _cuda(prepared.shape, True)
        )

    def tensorrt() -> Runner:
        backend, bundle = _engines(served, folder)
        return DeviceRunner(f"canvasrt, {backend.module.__name__}", served, backend, bundle)

    return {
        "onnxruntime": onnxruntime,
        "onnxruntime-graphs": graphs,
        "tensorrt": tensorrt,
        "transformers": lambda: TransformersRunner(prepared, static=False),
        "transformers-compiled": lambda: TransformersRunner(prepared, static=True),
    }


def _mixtures(prepared: shape.Prepared, folder: Path, small: bool) -> dict[str, Make]:
    size = prepared.config.hidden_size
    most = max(prepared.shape.batches) * prepared.config.canvas_length

    def onnxruntime() -> experts.ExpertLayer:
        file = shape.experts_graph(prepared.shape, prepared.config, folder)
        if small:
            from canvasrt.runtime.backends.onnxruntime import OrtBackend

            return experts.HostMixture(OrtBackend(), file, size)
        return experts.DeviceMixture(_cuda(prepared.shape), file, size, most)

    def tensorrt() -> experts.ExpertLayer:
        from canvasrt.build.compile import Job, compile_graph
        from canvasrt.pass_shapes import Range
        from canvasrt.runtime.backends.tensorrt import TensorRTBackend

        target = _target()
        module = require(*BUILDER_MODULES[target.builder])
        file = shape.experts_graph(prepared.shape, prepared.config, folder)
        engine = file.with_suffix(".engine")
        gpus = target.capabilities if target.builds_anywhere else ()
        sizes = {"tokens": Range(1, 256, most), "capacity": Range(1, 32, most)}
        compile_graph(Job(module.__name__, file, engine, gpus, {"all": sizes}))
        here = {
            "name": target.name,
            "backend": target.builder,
            "builder_version": module.__version__,
            "compute_capability": target.capability_text,
            "built_on": platform.machine(),
        }
        backend = TensorRTBackend(here, rows_apart=False)
        profiles = [{name: each.to_json() for name, each in sizes.items()}]
        return experts.DeviceMixture(backend, engine, size, most, profiles)

    return {"onnxruntime": onnxruntime, "tensorrt": tensorrt}


def _cuda(wanted: shape.Shape, graphs: bool = False) -> Any:
    from canvasrt.runtime.backends.onnxruntime_cuda import OrtCudaBackend

    return OrtCudaBackend(rows_apart=False, graphs=graphs, max_batch=max(wanted.batches))


def _engines(prepared: shape.Prepared, folder: Path) -> tuple[Any, Bundle]:
    """Return engines for this machine's GPU, built from the graphs, and the backend that runs them."""
    from canvasrt.build.plan import BuildOptions
    from canvasrt.pipeline import build_bundle
    from canvasrt.runtime.backends.tensorrt import TensorRTBackend

    target = _target()
    wanted = prepared.shape
    precision = prepared.graphs.manifest.options.get("precision", wanted.precision)
    context, batch = wanted.max_context, max(wanted.batches)
    bundle = build_bundle(
        prepared.graphs.path,
        target,
        # One folder keeps the engines of several runs.
        folder / f"{wanted.name}-engines-{precision}-{context}-{batch}",
        BuildOptions(precision, max_context=context, max_batch=batch),
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


if __name__ == "__main__":
    sys.exit(main())
