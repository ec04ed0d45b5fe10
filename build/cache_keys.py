"""The cache keys of a plan's graphs: everything that decides them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import canvasrt
from canvasrt import extras
from canvasrt.build.plan import Plan
from canvasrt.cache import GraphCache, code_hash
from canvasrt.types import Json

# Distributions whose versions affect the graphs.
_EXPORTED_BY = ("torch", "onnx", "onnx-ir", "onnxscript")
_QUANTIZED_BY = (*_EXPORTED_BY, "nvidia-modelopt", "numpy")

# Folders of canvasrt/ whose code affects graphs.
_SHARED = ("checkpoints", "graphs", "recipes")


def is_cached(plan: Plan) -> bool:
    """Return whether a plan's graphs already exist."""
    if plan.quantizes:
        return GraphCache().has(quantized_from(plan))
    return plan.source.graphs is not None or GraphCache().has(exported_from(plan))


def exported_precision(plan: Plan) -> str:
    """Return the precision to export in: a quantized checkpoint's own if that is requested."""
    same = plan.source.is_quantized and plan.precision.name == plan.source.precision
    return plan.precision.name if same else plan.precision.exported


def exported_from(plan: Plan) -> Json:
    """Return everything that decides the exported graphs of a plan."""
    # A quantized checkpoint may leave its activation scales to calibration.
    own = plan.calibration_hash if plan.source.is_quantized else None
    return {
        **plan.source.made_from,
        "precision": exported_precision(plan),
        "layers_per_segment": plan.layers_per_segment,
        "adapters": plan.adapter_hashes,
        "calibration": own,
        "made_by": _versions(_EXPORTED_BY, "export"),
    }


def quantized_from(plan: Plan) -> Json:
    """Return everything that decides the quantized graphs of a plan."""
    recipe = plan.precision.recipe
    assert recipe is not None
    return {
        "graphs": plan.source.made_from if plan.source.graphs else exported_from(plan),
        "recipe": recipe.to_json(),
        "calibration": plan.calibration_hash,
        "made_by": _versions(_QUANTIZED_BY, "export", "runtime"),
    }


def _versions(packages: tuple[str, ...], *stages: str) -> Json:
    """Return versions, and the hash of our own sources, which change more often than their version."""
    found = {name: version for name in packages if (version := extras.version(name))}
    shared = Path(canvasrt.__file__).parent
    sources = [*sorted(shared.glob("*.py")), *(shared / room for room in _SHARED)]
    for stage in stages:
        spec = importlib.util.find_spec(f"canvasrt.{stage}")
        sources += [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    return {**found, "canvasrt": canvasrt.__version__, "code": code_hash(sources)}
