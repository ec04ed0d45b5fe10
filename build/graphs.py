"""The graphs of a plan: exported, quantized, and kept for the next build and the next target."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import canvasrt
from canvasrt import extras
from canvasrt.build.cache import GraphCache, code_hash
from canvasrt.build.plan import Plan
from canvasrt.bundle import Bundle, HashProgress
from canvasrt.progress import Progress

# Distributions whose versions shape what they make.
_EXPORTED_BY = ("torch", "onnx", "onnx-ir", "onnxscript")
_QUANTIZED_BY = (*_EXPORTED_BY, "nvidia-modelopt", "onnxruntime", "numpy")

Json = dict[str, Any]


def graphs_of(plan: Plan, progress: Progress) -> Bundle:
    """The graph bundle that a plan's engines are built from, made where it is not there yet."""
    if not _is_quantized_here(plan):
        return _base(plan, progress)
    recipe = plan.precision.recipe
    assert recipe is not None

    def quantize(out: Path) -> None:
        from canvasrt.export.quantize.quantize import quantize as quantize_graphs

        quantize_graphs(_base(plan, progress), out, recipe, plan.calibration, progress)

    return GraphCache().get(_quantized_from(plan), quantize, _checking(progress))


def is_cached(plan: Plan) -> bool:
    """Whether a plan's graphs are there already."""
    if _is_quantized_here(plan):
        return GraphCache().has(_quantized_from(plan))
    return plan.source.graphs is not None or GraphCache().has(_exported_from(plan))


def _is_quantized_here(plan: Plan) -> bool:
    return plan.precision.is_quantized and not plan.source.is_quantized


def _base(plan: Plan, progress: Progress) -> Bundle:
    """The graphs as they are given, or as the checkpoint's export gives them."""
    if plan.source.graphs is not None:
        return plan.source.graphs
    return GraphCache().get(_exported_from(plan), _exporter(plan, progress), _checking(progress))


def _exporter(plan: Plan, progress: Progress) -> Callable[[Path], None]:
    precision = _exported_precision(plan)

    def export(out: Path) -> None:
        from canvasrt.export.graphs import export as export_graphs

        export_graphs(
            str(plan.source.path),
            out,
            layers_per_segment=plan.layers_per_segment,
            precision=precision,
            progress=lambda done, total: progress(f"exporting graphs ({precision})", done, total),
            adapters=plan.adapters,
            calibration=plan.calibration,
        )

    return export


def _exported_precision(plan: Plan) -> str:
    """What the export makes: a quantized checkpoint's own weights, where they are what is wanted."""
    same = plan.source.is_quantized and plan.precision.name == plan.source.precision
    return plan.precision.name if same else plan.precision.exported


def _exported_from(plan: Plan) -> Json:
    # A quantized checkpoint may leave the scales of its activations to who runs it.
    own = plan.calibration_hash if plan.source.is_quantized else None
    return {
        **plan.source.made_from,
        "precision": _exported_precision(plan),
        "layers_per_segment": plan.layers_per_segment,
        "adapters": plan.adapter_hashes,
        "calibration": own,
        "made_by": _versions(_EXPORTED_BY, "export"),
    }


def _quantized_from(plan: Plan) -> Json:
    recipe = plan.precision.recipe
    assert recipe is not None
    return {
        "graphs": plan.source.made_from if plan.source.graphs else _exported_from(plan),
        "recipe": recipe.to_json(),
        "calibration": plan.calibration_hash,
        "made_by": _versions(_QUANTIZED_BY, "export", "build", "runtime"),
    }


def _versions(packages: tuple[str, ...], *stages: str) -> Json:
    """What makes graphs here: versions, and our own sources, which change more often than their version."""
    found = {name: version for name in packages if (version := extras.version(name))}
    sources = sorted(Path(canvasrt.__file__).parent.glob("*.py"))
    for stage in stages:
        spec = importlib.util.find_spec(f"canvasrt.{stage}")
        sources += [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    return {**found, "canvasrt": canvasrt.__version__, "code": code_hash(sources)}


def _checking(progress: Progress) -> HashProgress:
    return lambda done, total: progress("checking graphs", done, total)
