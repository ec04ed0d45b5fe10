"""Builds one engine bundle per target from a checkpoint or graphs, reusing what has not changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from canvasrt.build import cpu, tensorrt
from canvasrt.build.cache_keys import (
    exported_from,
    exported_precision,
    is_quantized_here,
    quantized_from,
)
from canvasrt.build.checks import check_buildable, check_plan, check_space
from canvasrt.build.plan import DEFAULT_OPTIONS, BuildOptions, Plan, cut_alike, plan
from canvasrt.build.precision import choose_precisions
from canvasrt.build.source import find_source, hash_source
from canvasrt.bundle import MANIFEST, Bundle
from canvasrt.cache import GraphCache
from canvasrt.formats import PLAIN
from canvasrt.hashes import HashProgress
from canvasrt.progress import Progress, no_progress
from canvasrt.recipes.calibration import check_calibration
from canvasrt.staging import check_output
from canvasrt.targets import Target, find_target

BuildEngines = Callable[[Plan, Bundle, Progress], Bundle]

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
    progress: Progress | None = None,
) -> Bundle:
    """Build the engine bundle of one target at `out`.

    `source` is a graph bundle, or a checkpoint (a folder, a hub name or `demo`), which is exported
    first. An existing bundle made from the same source with the same options is returned as it is.
    """
    targets = [find_target(target) if isinstance(target, str) else target]
    ((_, bundle),) = build_all(plan_all(source, targets, out, options, progress), progress)
    return bundle


def build_all(plans: Sequence[Plan], progress: Progress | None = None) -> list[tuple[Plan, Bundle]]:
    """Carry out plans that share a source. What they have in common is exported and quantized once.

    Everything that can be refused is refused before the first byte is written.
    """
    report = progress or no_progress
    bundles = [made.existing() for made in plans]
    missing = [number for number, found in enumerate(bundles) if found is None]
    for number in missing:
        check_plan(plans[number])
        check_output(plans[number].out)
    check_space([plans[number] for number in missing])
    graphs: dict[str, Bundle] = {}
    for number in missing:
        made = plans[number]
        kind = made.precision.text
        if kind not in graphs:
            graphs[kind] = graphs_of(made, report)
        bundles[number] = BUILDERS[made.target.builder](made, graphs[kind], report)
    return [(made, bundle) for made, bundle in zip(plans, bundles, strict=True) if bundle]


def plan_all(
    source: Path | str,
    targets: Sequence[Target],
    out: Path | str,
    options: BuildOptions,
    progress: Progress | None = None,
    check: bool = True,
) -> list[Plan]:
    """Return one plan per target: a single one writes `out`, several write `out/<target>`.

    With `check`, what cannot be built here is refused, unless it has been built already. The source is hashed last.
    """
    found = find_source(source)
    precisions = choose_precisions(targets, options.precision, found.precision)
    is_calibrated = any(each.is_calibrated for each in precisions)
    check_calibration(options.calibration, is_calibrated, precisions[0].text)
    for target in targets if check else ():
        check_buildable(target)
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
    hashed = hash_source(found, progress)
    return [replace(each, source=hashed) for each in plans]


def graphs_of(plan: Plan, progress: Progress) -> Bundle:
    """Return the graph bundle for a plan's engines: from the cache, or made now."""
    if not is_quantized_here(plan):
        return _unquantized(plan, progress)
    recipe = plan.precision.recipe
    assert recipe is not None

    def quantize(out: Path) -> None:
        from canvasrt.export.quantize.quantize import quantize_graphs

        quantize_graphs(_unquantized(plan, progress), out, recipe, plan.calibration, progress)

    return GraphCache().get(quantized_from(plan), quantize, _checking(progress))


def _unquantized(plan: Plan, progress: Progress) -> Bundle:
    """Return the graphs as given, or exported from the checkpoint."""
    if plan.source.graphs is not None:
        return plan.source.graphs
    return GraphCache().get(exported_from(plan), _exporter(plan, progress), _checking(progress))


def _exporter(plan: Plan, progress: Progress) -> Callable[[Path], None]:
    precision = exported_precision(plan)

    def export(out: Path) -> None:
        from canvasrt.export.graphs import export_graphs

        export_graphs(
            plan.source.path,
            out,
            layers_per_segment=plan.layers_per_segment,
            precision=precision,
            progress=lambda done, total: progress(f"exporting graphs ({precision})", done, total),
            adapters=plan.adapters,
            # Otherwise its prompts are for the quantization that follows.
            calibration=plan.calibration if precision not in PLAIN else None,
            hashes=plan.source.made_from["files"],
        )

    return export


def _checking(progress: Progress) -> HashProgress:
    return lambda done, total: progress("checking graphs", done, total)
