"""The cache keys of a plan's graphs: all inputs that determine the graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from canvasrt.build.calibration import prompts_of
from canvasrt.build.plan import Plan
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.cache import (
    EXPORTED_BY,
    QUANTIZED_BY,
    GraphCache,
    key_of,
    unfinished_folder,
    versions,
)
from canvasrt.calibration_prompts import work_of
from canvasrt.errors import CanvasError
from canvasrt.types import Json


def is_cached(plan: Plan) -> bool:
    """Return whether a plan's graphs already exist."""
    cache = GraphCache()
    # A GPU's engines are also in the cache, so its graphs need no weights; a CPU's graphs need them.
    has = cache.has if plan.target.capability is not None else cache.has_all
    if plan.quantizes:
        return has(quantized_from(plan))
    return plan.source.graphs is not None or has(exported_from(plan))


def exported_precision(plan: Plan) -> str:
    """Return the precision of the exported graphs: a quantized checkpoint's own, if that is requested."""
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


def lowered_from(graphs: Bundle) -> tuple[str, Json]:
    """Return what identifies graphs lowered for a CPU: the kind of work, and its inputs."""
    return "lowerings", {"graphs": graphs.manifest.digest, "made_by": versions(EXPORTED_BY)}


def held_bytes(plans: Sequence[Plan]) -> int:
    """Return the bytes of cached files from which interrupted builds of these plans would resume."""
    sizes = {}
    for folder in {folder for plan in plans for folder in _begun(plan)}:
        for file in folder.rglob("*"):
            stat = file.lstat()
            sizes[stat.st_ino] = stat.st_size  # a linked file counts once
    return sum(sizes.values())


def _begun(plan: Plan) -> list[Path]:
    """Return the folders of a plan's graphs, finished or not, and of those being lowered; they need not exist."""
    source, recipe = plan.source, plan.precision.recipe
    folders = []
    if plan.quantizes and recipe is not None:
        prompts = prompts_of(source, recipe, plan.calibration) if recipe.is_calibrated else None
        cut: Json = {"layers_per_segment": plan.layers_per_segment}
        if source.graphs is not None:
            cut = {"graphs": source.graphs.manifest.digest, "known": None}
        else:
            adapters = {"adapters": plan.adapter_hashes} if plan.adapters else {}
            cut["checkpoint"] = source.made_from | adapters
        folders.append(unfinished_folder(*work_of(cut, recipe, prompts)))
    made_from = quantized_from(plan) if plan.quantizes else exported_from(plan)
    graphs = GraphCache().folder / key_of(made_from)
    try:
        found = load_bundle(
            graphs, "graphs", check=False, absent=lambda bundle: bundle.manifest.files
        )
        folders += [graphs, unfinished_folder(*lowered_from(found))]
    except CanvasError:  # no bundle, or a damaged one
        pass
    return folders
