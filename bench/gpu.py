"""Measures the whole model's shape: our graphs and engines, transformers on the same weights, and the floor.

    python -m bench.gpu -o results            on a GPU: the released shape, 30 layers
    python -m bench.gpu --small -o results    anywhere: reduced, so that the script is known to work

Nothing is downloaded. What is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import experts, floor, measure, report, shape
from bench.reference import TransformersRunner
from bench.runner import DeviceRunner, HostRunner, Runner
from canvasrt.bundle import Bundle
from canvasrt.errors import CanvasError, UsageError
from canvasrt.extras import require, version
from canvasrt.machine import gpus
from canvasrt.targets import TARGETS, Target

Json = dict[str, Any]
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
    "random, so that each token's experts are nearly a random choice."
)
SIDES = ("onnxruntime", "tensorrt", "transformers", "transformers-compiled")
# On a CPU compiling takes minutes, for a figure that says nothing.
SMALL_SIDES = SIDES[:3]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    small = options.small or not gpus()
    if small and not options.small:
        print("there is no GPU here: the reduced shape on the CPU (--small)", file=sys.stderr)
    wanted = _shape(options, small)
    folder = options.work or Path(tempfile.mkdtemp(prefix="canvasrt-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        sides = options.sides.split(",") if options.sides else SMALL_SIDES if small else SIDES
        data = run(wanted, folder, small, sides)
    except (CanvasError, UsageError) as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 1
    finally:
        if options.work is None:
            shutil.rmtree(folder, ignore_errors=True)
    data["command"] = " ".join(["python -m bench.gpu", *(arguments or sys.argv[1:])])
    for file in report.write(data, options.out):
        print(file)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--small", action="store_true", help="the reduced shape, on the CPU")
    parser.add_argument("--work", type=Path, help="where graphs are kept for another run")
    parser.add_argument("--sides", help=f"some of {', '.join(SIDES)}, separated by commas")
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


def run(wanted: shape.Shape, folder: Path, small: bool, sides: Sequence[str]) -> Json:
    """All measurements of a shape, over files in `folder`."""
    if unknown := set(sides) - set(SIDES):
        raise UsageError(f"unknown side {min(unknown)!r}", f"sides are: {', '.join(SIDES)}")
    prepared = shape.prepare(wanted, folder)
    config = prepared.config
    rates = measure.attempt(lambda: floor.rates(small))
    makers = {
        name: make for name, make in _makers(prepared, folder, small).items() if name in sides
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
        else {str(b): floor.floor_ms(prepared, rates, b) for b in wanted.batches},
        "routing": ROUTING,
        "mean_load": config.canvas_length * config.top_k_experts / config.num_experts,
        "sides": {},
        "experts": {},
    }
    for name, make in makers.items():
        print(f"measuring {name}", file=sys.stderr, flush=True)
        data["sides"][name] = measure.attempt(lambda m=make: measure.side(m(), wanted))
        _free()
    for name, make in _mixtures(prepared, folder, small).items():
        if name in sides:
            print(f"measuring experts alone, {name}", file=sys.stderr, flush=True)
            data["experts"][name] = measure.attempt(lambda m=make: _experts(m(), wanted, config))
    return data


def _free() -> None:
    """Gives back what the last side held on the device."""
    gc.collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()


def _experts(mixture: experts.Mixture, wanted: shape.Shape, config: Any) -> Json:
    counts = [batch * config.canvas_length for batch in wanted.batches]
    return {str(n): experts.measure_experts(mixture, n, wanted.repeats) for n in counts}


def _makers(prepared: shape.Prepared, folder: Path, small: bool) -> dict[str, Callable[[], Runner]]:
    """What makes each side; a side is made when it is its turn, so that one is in memory at a time."""

    def onnxruntime() -> Runner:
        if small:
            from canvasrt.runtime.onnxruntime import OrtBackend

            return HostRunner(prepared, OrtBackend())
        return DeviceRunner("canvasrt, ONNX Runtime on CUDA", prepared, _cuda(prepared.shape))

    def tensorrt() -> Runner:
        backend, bundle = _engines(prepared, folder)
        return DeviceRunner(f"canvasrt, {backend.module.__name__}", prepared, backend, bundle)

    return {
        "onnxruntime": onnxruntime,
        "tensorrt": tensorrt,
        "transformers": lambda: TransformersRunner(prepared, static=False),
        "transformers-compiled": lambda: TransformersRunner(prepared, static=True),
    }


def _mixtures(prepared: shape.Prepared, folder: Path, small: bool) -> dict[str, Make]:
    size = prepared.config.hidden_size
    most = max(prepared.shape.batches) * prepared.config.canvas_length

    def onnxruntime() -> experts.Mixture:
        file = shape.experts_graph(prepared.shape, prepared.config, folder)
        if small:
            from canvasrt.runtime.onnxruntime import OrtBackend

            return experts.HostMixture(OrtBackend(), file, size)
        return experts.DeviceMixture(_cuda(prepared.shape), file, size, most)

    def tensorrt() -> experts.Mixture:
        from canvasrt.build.compile import Job, compile_graph
        from canvasrt.build.profiles import Range

        backend, _ = _engines(prepared, folder)
        file = shape.experts_graph(prepared.shape, prepared.config, folder)
        target, engine = _target(), file.with_suffix(".engine")
        capability = target.capability if target.builds_anywhere else None
        sizes = {"tokens": Range(1, 256, most), "capacity": Range(1, 32, most)}
        compile_graph(Job(backend.module.__name__, file, engine, capability, {"all": sizes}))
        profiles = [{name: each.to_json() for name, each in sizes.items()}]
        return experts.DeviceMixture(backend, engine, size, most, profiles)

    return {"onnxruntime": onnxruntime, "tensorrt": tensorrt}


def _cuda(wanted: shape.Shape) -> Any:
    from canvasrt.runtime.onnxruntime_cuda import OrtCudaBackend

    return OrtCudaBackend(rows_apart=False, max_batch=max(wanted.batches))


def _engines(prepared: shape.Prepared, folder: Path) -> tuple[Any, Bundle]:
    """Engines for the GPU that is here, built from the graphs, and the backend that runs them."""
    from canvasrt.build import build
    from canvasrt.runtime.tensorrt import TensorRTBackend

    target = _target()
    wanted = prepared.shape
    bundle = build(
        prepared.graphs.path,
        target,
        folder / f"{wanted.name}-engines",
        wanted.precision,
        max_context=wanted.max_context,
        max_batch=max(wanted.batches),
    )
    assert bundle.manifest.target is not None
    return TensorRTBackend(bundle.manifest.target, rows_apart=False), bundle


def _target() -> Target:
    """The target of the GPU that is here."""
    if not gpus():
        raise CanvasError("TensorRT needs a GPU, and there is none here", "see docs/hardware.md")
    here = gpus()[0]
    found = [target for target in TARGETS if target.capability == here.capability]
    if not found:
        raise CanvasError(f"no target has the capability of {here.name}", "canvasrt targets")
    module = "tensorrt_rtx" if found[0].builder == "tensorrt-rtx" else "tensorrt"
    require(module, "rtx" if module == "tensorrt_rtx" else "tensorrt")
    # Of two with one capability, the one with more memory refuses less.
    return max(found, key=lambda target: target.memory or 0)


if __name__ == "__main__":
    sys.exit(main())
