"""`canvasrt build`: builds engines from a checkpoint or graphs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvasrt.cli import options
from canvasrt.console import duration, emit, progress, size
from canvasrt.defaults import MAX_BATCH, SLOTTED

if TYPE_CHECKING:
    from canvasrt.build.calibration_needs import CalibrationNeeds
    from canvasrt.build.plan import Plan
    from canvasrt.bundle import Bundle

# Options whose values are too long for the summary.
LONG = ("recipe", "adapters")


def build(
    source: options.Source,
    target: options.Targets,
    out: options.BuildOut = Path("engines"),
    precision: options.Precision = None,
    max_context: options.MaxContext = None,
    max_batch: options.MaxBatch = MAX_BATCH,
    layers_per_segment: options.LayersPerSegment = None,
    calibration: options.Calibration = None,
    adapter: options.Adapter = None,
    experts: options.Experts = SLOTTED,
    keep_graphs: options.KeepGraphs = False,
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
) -> None:
    """Build engines for one or more targets; a repeated build reuses what has not changed."""
    from canvasrt.build.options import BuildOptions
    from canvasrt.pipeline import build_all, plan_all
    from canvasrt.targets import parse_targets

    targets = parse_targets(target)
    adapters = tuple(options.adapters(adapter))
    wanted = BuildOptions(
        precision,
        max_context,
        max_batch,
        layers_per_segment,
        calibration,
        adapters,
        experts,
        keep_graphs,
    )
    with progress():
        plans = plan_all(source, targets, out, wanted, check=not dry_run)
        if not dry_run:
            reused = [made.existing() is not None for made in plans]
            _say_calibrations([each for each, kept in zip(plans, reused, strict=True) if not kept])
            made = build_all(plans)
    if dry_run:
        _show_plans(plans)
    else:
        _show_bundles(made, reused)


def _show_plans(plans: Sequence[Plan]) -> None:
    rows = []
    for plan in plans:
        not_here, hint = _why_not(plan)
        rows.append({**plan.to_json(), "not_here": not_here, "hint": hint})

    def render(console: Any) -> None:
        for plan, row in zip(plans, rows, strict=True):
            _draw_plan(console, plan, row["not_here"], row["hint"])

    emit(rows, render)


def _why_not(plan: Plan) -> tuple[str | None, str | None]:
    """Return two texts, each of which can be None: why the plan would be refused, and a hint. If this machine can build
    the engines but has too little memory to run them, the hint says what would fit."""
    from canvasrt.build.checks import check_plan, check_space, what_fits
    from canvasrt.errors import CanvasError
    from canvasrt.machine import memory_bytes

    try:
        check_plan(plan)
        check_space([plan])
    except CanvasError as error:
        return error.message, error.hint
    here = memory_bytes()
    tight = plan.target.memory is None and plan.memory.total > here
    return None, what_fits(plan, here) if tight else None


def _draw_plan(console: Any, plan: Plan, not_here: str | None, hint: str | None) -> None:
    from canvasrt.build.checks import lighter_segments, requests_of
    from canvasrt.machine import memory_bytes

    need, here = plan.memory, plan.needs
    kernels = f" kernels {size(need.code)}," if need.code else ""
    on_host = f", and {size(need.contexts_on_host)} on the host" if need.contexts else ""
    blind = ", without images" if plan.options.get("vision") is False else ""
    console.print(f"{plan.target.name} → {plan.out}", style="bold")
    console.print(f"  from       {plan.source.path} ({plan.source.made_from['kind']})")
    console.print(f"  builder    {plan.target.builder}, {plan.precision.text} weights")
    console.print(
        f"  serves     up to {requests_of(plan)} at once,"
        f" reading prompts {plan.reading.prefill_chunk} tokens at a time{blind}"
    )
    console.print(
        f"  memory     {size(need.total)}: weights {size(need.weights)},{kernels}"
        f" KV cache {size(need.kv_cache)}, workspace {size(need.workspace)},"
        f" buffers {size(need.buffers)}, contexts {size(need.contexts)}{on_host}"
    )
    on = plan.target.gpu
    there = plan.target.memory
    if there is None:
        on, there = "this machine", memory_bytes()
    verdict = "fits" if need.total <= there else "does not fit"
    console.print(f"  runs on    {on}, {size(there)}: {verdict}")
    lighter = lighter_segments(plan)
    less = f", {size(lighter[1])} with --layers-per-segment {lighter[0]}" if lighter else ""
    if here.calibration:
        console.print(f"  calibrates {_calibration(here.calibration)}")
    console.print(
        f"  building   {size(here.memory)} of memory{less}; on disk {size(here.graphs)} of graphs"
        f" and {size(here.engines)} of engines, {size(plan.disk)} at the peak, minus what is in the cache"
    )
    console.print(f"  build here {'no: ' + not_here if not_here else 'yes'}")
    if hint:
        console.print(f"  hint       {hint}")


def _calibration(needs: CalibrationNeeds) -> str:
    work = needs.work
    return (
        f"{work.prompts} prompts, {work.passes} passes at most in {work.sweeps} sweeps over the weights:"
        f" {size(needs.memory)} of memory, about {duration(needs.seconds())}"
    )


def _say_calibrations(plans: Sequence[Plan]) -> None:
    """Print how much memory and time calibrations will need, before they start."""
    from canvasrt.build.reuse import is_calibrated, reusable_graphs

    for plan in {each.precision.text: each for each in plans}.values():
        same = [each for each in plans if each.precision.text == plan.precision.text]
        if not plan.needs.calibration or reusable_graphs(same):
            continue
        said = f"calibrating for {plan.precision.text}: {_calibration(plan.needs.calibration)}"
        if is_calibrated(plan):
            said = f"calibrated for {plan.precision.text} by an earlier build"
        print(said, file=sys.stderr, flush=True)


def _show_bundles(made: Sequence[tuple[Plan, Bundle]], reused: Sequence[bool]) -> None:
    rows = [
        {
            "bundle": str(bundle.path),
            "target": plan.target.name,
            "digest": bundle.manifest.digest,
            "bytes": bundle.manifest.total_bytes,
            "reused": kept,
            **{name: value for name, value in plan.options.items() if name not in LONG},
        }
        for (plan, bundle), kept in zip(made, reused, strict=True)
    ]

    def render(console: Any) -> None:
        for row in rows:
            state = "up to date" if row["reused"] else f"built, {size(row['bytes'])}"
            console.print(f"{row['bundle']}: {row['target']} engines, {state}")

    emit(rows, render)
