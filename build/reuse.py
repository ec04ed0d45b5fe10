"""Finds what a build can reuse: graphs and engines in the cache, and the files of an interrupted build."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from canvasrt.build import cpu, tensorrt
from canvasrt.build.calibration_needs import prompts_of
from canvasrt.build.graph_keys import graphs_from, lowered_from
from canvasrt.build.plan import Plan
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.cache import GraphCache, key_of, unfinished_folder
from canvasrt.calibration_prompts import CALIBRATED, CALIBRATIONS, QUANTIZATIONS, work_of
from canvasrt.errors import CanvasError
from canvasrt.types import Json


def built_weights(plans: Sequence[Plan], graphs: Bundle) -> set[str]:
    """Return the weight files that no plan needs to read, because everything built from them is in the cache."""
    gone = [
        (cpu if each.target.capability is None else tensorrt).built_weights(each, graphs)
        for each in plans
    ]
    return set.intersection(*gone) if gone else set()


def reusable_graphs(plans: Sequence[Plan]) -> Bundle | None:
    """Return the graphs shared by these plans, which have one precision; None if a weight that they read is missing."""
    if plans[0].source.graphs is not None and not plans[0].quantizes:
        return plans[0].source.graphs
    return _cached(plans[0], partial(built_weights, plans))


def held_bytes(plans: Sequence[Plan]) -> int:
    """Return the size, in bytes, of the cached files from which these plans would resume."""
    sizes = {}
    for folder in {folder for plan in plans for folder in _begun(plan)}:
        for file in folder.rglob("*"):
            stat = file.lstat()
            sizes[stat.st_ino] = stat.st_size  # a linked file counts once
    return sum(sizes.values())


def is_calibrated(plan: Plan) -> bool:
    """Return whether an earlier build has left the result of this plan's calibration in the cache."""
    return any((folder / CALIBRATED).is_file() for folder in _quantizing(plan))


def _begun(plan: Plan) -> list[Path]:
    """Return the folders of a plan's unfinished, finished and lowered graphs. They need not exist."""
    folders = _quantizing(plan)
    if found := _cached(plan, lambda bundle: bundle.manifest.files):
        folders += [found.path, unfinished_folder(*lowered_from(found))]
    return folders


def _quantizing(plan: Plan) -> list[Path]:
    """Return the folders that keep a plan's progress in calibrating and in quantizing; none if the plan does not
    quantize. They need not exist."""
    source, recipe = plan.source, plan.precision.recipe
    if not plan.quantizes or recipe is None:
        return []
    prompts = prompts_of(source, recipe, plan.calibration) if recipe.is_calibrated else None
    cut: Json = {}
    if source.graphs is not None:
        made_from: Json = {"graphs": source.graphs.manifest.digest, "known": None}
    else:
        cut = {"layers_per_segment": plan.layers_per_segment}
        adapters = {"adapters": plan.adapter_hashes} if plan.adapters else {}
        made_from = {"checkpoint": source.made_from | adapters}
    work = work_of(made_from, recipe, prompts)
    return [unfinished_folder(CALIBRATIONS, work), unfinished_folder(QUANTIZATIONS, work | cut)]


def _cached(plan: Plan, absent: Callable[[Bundle], Collection[str]]) -> Bundle | None:
    folder = GraphCache().folder / key_of(graphs_from(plan))
    with contextlib.suppress(CanvasError):  # no bundle, or a damaged one
        return load_bundle(folder, "graphs", check=False, absent=absent)
    return None
