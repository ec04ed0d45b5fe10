"""The cache keys of a plan's graphs. A key names everything that determines the graphs."""

from __future__ import annotations

from canvasrt.build.plan import Plan
from canvasrt.bundle import Bundle
from canvasrt.cache import EXPORTED_BY, QUANTIZED_BY, versions
from canvasrt.types import Json


def exported_precision(plan: Plan) -> str:
    """Return the precision of the exported graphs. A quantized checkpoint keeps its own precision if the plan requests
    that."""
    same = plan.source.is_quantized and plan.precision.name == plan.source.precision
    return plan.precision.name if same else plan.precision.exported


def exported_from(plan: Plan) -> Json:
    """Return all inputs that determine a plan's exported graphs."""
    # The activation scales of a quantized checkpoint can come from calibration.
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


def graphs_from(plan: Plan) -> Json:
    """Return all inputs that determine the graphs from which a plan's engines are built."""
    return quantized_from(plan) if plan.quantizes else exported_from(plan)


def lowered_from(graphs: Bundle) -> tuple[str, Json]:
    """Return what identifies a lowering of graphs for a CPU: the name of this work, and all of its inputs."""
    return "lowerings", {"graphs": graphs.manifest.digest, "made_by": versions(EXPORTED_BY)}
