"""Builds one engine bundle per target from a checkpoint or graphs, and reuses unchanged results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from canvasrt.build import cpu, tensorrt
from canvasrt.build.checks import check_plan, check_space
from canvasrt.build.graph_keys import (
    exported_from,
    exported_precision,
    graphs_from,
    quantized_from,
)
from canvasrt.build.options import DEFAULT_OPTIONS, BuildOptions
from canvasrt.build.plan import Plan, cut_alike, plan
from canvasrt.build.precision import choose_precisions
from canvasrt.build.reuse import built_weights
from canvasrt.build.source import find_source, hash_source
from canvasrt.bundle import MANIFEST, Bundle
from canvasrt.cache import GraphCache, lock_graphs
from canvasrt.calibration_prompts import check_calibration
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
    bundles = [made.existing() for made in plans]
    missing = [number for number, found in enumerate(bundles) if found is None]
    for number in missing:
        out = plans[number].out.resolve()
        check_output(out)
        remove_stale(out.parent, out.name)
    check_space([plans[number] for number in missing])
    graphs: dict[str, Bundle] = {}
    ours = [
        plans[each] for each in missing if plans[each].quantizes or not plans[each].source.graphs
    ]
    # A build that quantizes can read graphs that another build removes.
    exported = [exported_from(each) for each in ours if each.source.graphs is None]
    with lock_graphs([*map(graphs_from, ours), *exported]):
        for number in missing:
            made = plans[number]
            if found := made.existing():  # another process has just written it
                bundles[number] = found
                continue
            kind = made.precision.text
            if kind not in graphs:
                graphs[kind] = graphs_of(made, [plans[each] for each in missing])
            if any(plans[each].precision.text == kind for each in missing if each > number):
                made = replace(made, keep_graphs=True)
            bundles[number] = BUILDERS[made.target.builder](made, graphs[kind])
    return [(made, bundle) for made, bundle in zip(plans, bundles, strict=True) if bundle]


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
    precisions = choose_precisions(targets, options.precision, found.precision)
    ends = found.graphs is not None and found.is_quantized
    is_calibrated = not ends and any(each.is_calibrated for each in precisions)
    what = "what is already quantized" if ends else precisions[0].text
    check_calibration(options.calibration, is_calibrated, what)
    folders = [Path(out)] if len(targets) == 1 else [Path(out) / each.name for each in targets]
    plans = cut_alike(
        [
            plan(found, target, folder, options, precision)
            for target, folder, precision in zip(targets, folders, precisions, strict=True)
        ]
    )
    for each in plans if check else ():
        if not (each.out / MANIFEST).exists():
            check_plan(each)
    hashed = hash_source(found)
    return [replace(each, source=hashed) for each in plans]


def graphs_of(plan: Plan, plans: Sequence[Plan] = ()) -> Bundle:
    """Return the graph bundle for a plan's engines: from the cache, or exported and quantized now.

    The bundle can lack a file of weights if everything that `plans` build from that file is already in the cache.
    """
    cache, recipe = GraphCache(), plan.precision.recipe
    same = [each for each in plans if each.precision.text == plan.precision.text]

    absent = partial(built_weights, same)
    given = plan.source.graphs
    if given is not None and not plan.quantizes:
        return given  # without importing the export, which may not be installed
    exported = exported_from(plan)
    if not plan.quantizes or recipe is None:
        return cache.get(exported, partial(_export, plan, None), absent)

    def quantize(out: Path) -> None:
        from canvasrt.export.quantize.quantize import quantize_graphs

        plain = given or cache.get(exported, partial(_export, plan, None))
        quantize_graphs(plain, out, recipe, plan.calibration)

    from_graphs = given is not None or cache.has_all(exported)
    make = quantize if from_graphs else partial(_export, plan, recipe)
    return cache.get(quantized_from(plan), make, absent)


def _export(plan: Plan, recipe: Recipe | None, out: Path) -> None:
    """Export a checkpoint; with a recipe, quantize its weights on the way."""
    from canvasrt.export.graphs import export_graphs

    assert plan.source.checkpoint is not None
    precision = exported_precision(plan)
    export_graphs(
        plan.source.checkpoint,
        out,
        layers_per_segment=plan.layers_per_segment,
        precision=precision,
        adapters=plan.adapters,
        calibration=plan.calibration if recipe or precision not in PLAIN else None,
        recipe=recipe,
    )
