"""Builds one engine bundle per target from a checkpoint or graphs, and reuses unchanged results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from canvasrt.build import cpu, tensorrt
from canvasrt.build.checks import check_plan, check_space
from canvasrt.build.options import DEFAULT_OPTIONS, BuildOptions
from canvasrt.build.plan import Plan, make_plans
from canvasrt.build.reuse import Work, built_weights, existing, find_work
from canvasrt.build.source import find_source, hash_source
from canvasrt.bundle import MANIFEST, Bundle
from canvasrt.cache import GraphCache, lock_graphs
from canvasrt.formats import PLAIN
from canvasrt.recipes.recipe import Recipe
from canvasrt.staging import check_output, remove_stale
from canvasrt.targets import Target, find_target

BuildEngines = Callable[[Plan, Bundle], Bundle]

# Builder in the table of targets → the function that builds its engines.
BUILDERS: dict[str, BuildEngines] = {
    "onnxruntime": cpu.build_engines,
    "tensorrt-rtx": tensorrt.build_engines,
    "tensorrt": tensorrt.build_engines,
}


def build_bundle(
    source: Path | str,
    target: Target | str,
    out: Path | str,
    options: BuildOptions = DEFAULT_OPTIONS,
) -> Bundle:
    """Build the engine bundle of one target at `out`.

    `source` is a graph bundle, or a checkpoint (a folder, a hub name or `demo`), which is exported
    first. An existing bundle of the same source and options is returned unchanged.
    """
    targets = [find_target(target) if isinstance(target, str) else target]
    ((_, bundle),) = build_all(plan_all(source, targets, out, options))
    return bundle


def build_all(plans: Sequence[Plan]) -> list[tuple[Plan, Bundle]]:
    """Build plans that `plan_all` returned for one source. Graphs that several plans need are exported and quantized
    once.

    The disks are checked before the first byte is written.
    """
    return build_work(find_work(plans))


def build_work(work: Work) -> list[tuple[Plan, Bundle]]:
    """Build the missing bundles, and return all of them, as `build_all` does."""
    missing = work.missing
    for plan in missing:
        out = plan.out.resolve()
        check_output(out)
        remove_stale(out.parent, out.name)
    check_space(missing, work.graphs)
    ours = [plan for plan in missing if plan.given_graphs is None]
    # The exported graphs that a quantizing build reads are locked, too, so that no other build removes them.
    exported = [plan.exported_from for plan in ours if plan.source.graphs is None]
    graphs: dict[str, Bundle] = {}
    built: dict[Path, Bundle] = {}
    with lock_graphs([*(plan.graphs_from for plan in ours), *exported]):
        for number, plan in enumerate(missing):
            found = existing(plan)  # another process may have just written it
            if found is None:
                kind = plan.precision.text
                if kind not in graphs:
                    graphs[kind] = graphs_of(plan, missing)
                others = any(other.precision.text == kind for other in missing[number + 1 :])
                made = replace(plan, keep_graphs=True) if others else plan
                found = BUILDERS[plan.target.builder](made, graphs[kind])
            built[plan.out] = found
    each = zip(work.plans, work.bundles, strict=True)
    return [(plan, found or built[plan.out]) for plan, found in each]


def plan_all(
    source: Path | str,
    targets: Sequence[Target],
    out: Path | str,
    options: BuildOptions,
    check: bool = True,
) -> list[Plan]:
    """Return one plan per target. A single plan writes to `out`, several to `out/<target>`.

    With `check`, raises CanvasError if a plan cannot be built here and its bundle does not exist yet. The source is
    hashed last, because that can take long.
    """
    found = find_source(source)
    plans = make_plans(found, targets, out, options)
    for plan in plans if check else ():
        if not (plan.out / MANIFEST).exists():
            check_plan(plan)
    hashed = hash_source(found)
    return [replace(plan, source=hashed) for plan in plans]


def graphs_of(plan: Plan, plans: Sequence[Plan] = ()) -> Bundle:
    """Return the graph bundle for a plan's engines: from the cache, or exported and quantized now.

    The bundle can lack a file of weights if everything that `plans` build from that file is already in the cache.
    """
    if plan.given_graphs is not None:
        return plan.given_graphs  # without importing the export, which may not be installed
    same = [each for each in plans if each.precision.text == plan.precision.text]
    make, absent = partial(_make_graphs, plan), partial(built_weights, same)
    return GraphCache().get(plan.graphs_from, make, absent)


def _make_graphs(plan: Plan, out: Path) -> None:
    """Export the checkpoint, and quantize its weights during the export. If there are plain graphs, quantize these
    instead."""
    cache, given, recipe = GraphCache(), plan.source.graphs, plan.precision.recipe
    if not plan.quantizes or recipe is None:
        _export(plan, None, out)
    elif given is None and cache.find(plan.exported_from) is None:
        _export(plan, recipe, out)
    else:
        from canvasrt.export.quantize.quantize import quantize_graphs

        plain = given or cache.get(plan.exported_from, partial(_export, plan, None))
        quantize_graphs(plain, out, recipe, plan.calibration)


def _export(plan: Plan, recipe: Recipe | None, out: Path) -> None:
    """Export a checkpoint; with a recipe, quantize its weights during the export."""
    from canvasrt.export.graphs import export_graphs

    assert plan.source.checkpoint is not None
    precision = plan.exported_precision
    export_graphs(
        plan.source.checkpoint,
        out,
        layers_per_segment=plan.layers_per_segment,
        precision=precision,
        adapters=plan.adapters,
        calibration=plan.calibration if recipe or precision not in PLAIN else None,
        recipe=recipe,
    )
