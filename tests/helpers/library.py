"""Checkpoints, exported graphs and built bundles, created once for all tests and workers of a run.

`CANVASRT_TEST_CACHE` names a folder that keeps them between runs. Without it, every run begins with an empty folder.
Tests must not change the files; they change copies.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

import canvasrt
from canvasrt.build.options import BuildOptions
from canvasrt.cache import cache_folder, code_hash, key_of
from canvasrt.extras import version
from canvasrt.pipeline import build_bundle, graphs_of, plan_all
from canvasrt.targets import find_target

ROOT = Path(__file__).parents[2]
PRODUCT = (
    "canvasrt",
    *(f"canvasrt.{each}" for each in ("export", "build", "runtime", "containers")),
)
# The sources that determine a build. The folder name of the graphs already has the hash of the export's sources.
BUILDING = ("canvasrt", "canvasrt.build")
PACKAGES = ("numpy", "nvidia-modelopt", "onnx", "onnx-ir", "onnxruntime", "onnxscript")
PACKAGES += ("tensorrt", "tensorrt-rtx", "torch", "transformers", "triton")


def checkpoint(model: str) -> Path:
    """Return a checkpoint: `demo`, `demo-vision`, `undertrained`, or a random one.

    Random ones are `tiny` (tests/helpers/reference.py), `served` (serving.py), `small` (quantized.py), `random-KEY` for
    the keys of `SHAPES` in random_models.py, and `as-KEY` for the keys of `FORMS` in quantized_checkpoints.py.
    """
    from canvasrt.checkpoints.locate import find_checkpoint

    if model in ("demo", "demo-vision"):
        return find_checkpoint(model)
    if model == "undertrained":
        return ROOT / "tests" / "data" / model
    return kept(_write_checkpoint, model, code=("bench.demo", "bench.synthetic"))


def graphs(
    model: str | Path, precision: str | None = None, layers_per_segment: int | None = None
) -> Path:
    """Return the graphs of a model or of a checkpoint's folder, by default in the checkpoint's precision or fp32.

    They are in the product's cache, where builds by the command line also find them.
    """
    options = BuildOptions(precision=precision, layers_per_segment=layers_per_segment)
    target = "cpu" if precision in (None, *find_target("cpu").precisions) else "rtx-5090"
    return _exported(str(model), target, options)


def bundle(model: str | Path, target: str = "cpu", **options: Any) -> Path:
    """Return engines of a model, a checkpoint's folder or graphs. `options` are fields of `BuildOptions`."""
    chosen = BuildOptions(**options)
    graphs = model if _is_graphs(model) else _exported(str(model), target, chosen)
    return kept(_build, str(model), target, chosen, Path(graphs).name, code=BUILDING)


def package_of(engines: Path) -> Path:
    """Return a package of engines."""
    return kept(_package, str(engines))


def kept(make: Callable[..., object], *arguments: Any, code: Sequence[str] = PRODUCT) -> Path:
    """Return the folder that `make(folder, *arguments)` writes, in this run or in an earlier one.

    The folder does not exist when `make` is called. The key consists of the function's name, its arguments as text, and
    the sources of its module, of tests/helpers, and of the modules and packages in `code`.
    """
    module = getattr(make, "__module__", "")
    text = [_relative(each) for each in arguments]
    key = key_of(
        {
            "make": f"{module}.{make.__qualname__}",
            "arguments": text,
            **_made_by((module, *code)),
        }
    )
    folder = _folder() / f"{make.__name__.strip('_')}-{key[:16]}"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            staged = folder.with_suffix(".tmp")
            shutil.rmtree(staged, ignore_errors=True)
            make(staged, *arguments)
            staged.rename(folder)
    return folder


def empty_cache(folder: Path) -> Path:
    """Create a cache for the product that contains only the layers traced in this run; return it."""
    traces = cache_folder() / "traces"
    traces.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    (folder / "traces").symlink_to(traces)
    return folder


def _folder() -> Path:
    """Return the folder of this run's library, which tests/conftest.py chooses."""
    folder = Path(os.environ["CANVASRT_TEST_CACHE"]) / "library"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _relative(argument: Any) -> str:
    """Return an argument as text. A path must be in the cache or in the sources; its relative name is the same in every
    run."""
    text = str(argument)
    for base in (os.environ["CANVASRT_TEST_CACHE"], str(ROOT)):
        text = text.removeprefix(base + os.sep)
    assert not text.startswith(os.sep), f"{argument} is neither in the library nor in the sources"
    return text


@cache
def _made_by(modules: tuple[str, ...]) -> dict[str, Any]:
    """Return what determines the result in addition to the arguments: sources and versions of packages."""
    sources: list[Path] = []
    for spec in (importlib.util.find_spec(each) for each in ("tests.helpers", *modules)):
        if spec is not None:
            places = spec.submodule_search_locations or [spec.origin or ""]
            sources += [Path(each) for each in places if each]
    return {
        "canvasrt": canvasrt.__version__,
        "code": code_hash(sources),
        "packages": {each: version(each) for each in PACKAGES},
    }


def _source(model: str | Path) -> Path:
    """Return the folder of a model, given its name or its folder."""
    return Path(model) if os.sep in str(model) else checkpoint(str(model))


def _is_graphs(model: str | Path) -> bool:
    return os.sep in str(model) and (Path(model) / "manifest.json").exists()


@cache
def _exported(model: str, target: str, options: BuildOptions) -> Path:
    """Export and quantize into the product's cache. Two workers never export the same model at the same time."""
    source = _source(model)
    with FileLock(_folder() / f"export-{source.name}.lock"):
        (plan,) = plan_all(source, [find_target(target)], _folder() / "none", options, check=False)
        return graphs_of(plan).path


def _build(out: Path, model: str, target: str, options: BuildOptions, graphs: str) -> None:
    build_bundle(_source(model), target, out, options)


def _package(out: Path, engines: str) -> None:
    from canvasrt.containers.package.package import package

    package(Path(engines), out)


def _write_checkpoint(out: Path, model: str) -> None:
    """Write a random model as `checkpoint` describes."""
    from tests.helpers import (
        quantized,
        quantized_checkpoints,
        random_models,
        reference,
        serving,
    )

    if model == "served":
        serving.write_random(out)
    elif model == "small":
        quantized.write_small(out)
    elif model == "tiny":
        reference.tiny_model().save_pretrained(out)
    elif model.startswith("as-"):
        quantized_checkpoints.FORMS[model.removeprefix("as-")](out)
    else:
        shape = random_models.SHAPES[model.removeprefix("random-")]
        random_models.random_model(shape).save_pretrained(out)
        quantized_checkpoints.without_vision(out)
