"""The cache keys of a plan's graphs: all inputs that determine the graphs."""

from __future__ import annotations

from canvasrt.build.plan import Plan
from canvasrt.cache import EXPORTED_BY, QUANTIZED_BY, GraphCache, versions
from canvasrt.types import Json


def is_cached(plan: Plan) -> bool:
    """Return whether a plan's graphs already exist."""
    cache = GraphCache()
    # GPUs' engines are in the cache, too. For a CPU, graphs without their weights are made again.
    has = cache.has if plan.target.capability is not None else cache.has_all
    if plan.quantizes:
        return has(quantized_from(plan))
    return plan.source.graphs is not None or has(exported_from(plan))


def exported_precision(plan: Plan) -> str:
    """Return the precision of the export. If a quantized checkpoint's own precision is requested, it is that one."""
    same = plan.source.is_quantized and plan.precision.name == plan.source.precision
    return plan.precision.name if same else plan.precision.exported


def exported_from(plan: Plan) -> Json:
    """Return all inputs that determine a plan's exported graphs."""
    # The activation scales of a quantized checkpoint may come from calibration.
    own = plan.calibration_hash if plan.source.is_quantized else None
    return {
        **plan.source.made_from,
        "precision": exported_precision(plan),
        "layers_per_segment": plan.layers_per_segment,
        "adapters": plan.adapter_hashes,
        "calibration": own,
        "made_by": versions(EXPORTED_BY, "export"),
    }


def quantized_from(plan: Plan) -> Json:
    """Return all inputs that determine a plan's quantized graphs."""
    recipe = plan.precision.recipe
    assert recipe is not None
    return {
        "graphs": plan.source.made_from if plan.source.graphs else exported_from(plan),
        "recipe": recipe.to_json(),
        "calibration": plan.calibration_hash,
        "made_by": versions(QUANTIZED_BY, "export", "runtime"),
    }
