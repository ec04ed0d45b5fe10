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
    from canvasrt.build.checks import Verdict
    from canvasrt.build.plan import Plan
    from canvasrt.build.reuse import Work
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
    from canvasrt.build.reuse import find_work
    from canvasrt.pipeline import build_work, plan_all
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
            work = find_work(plans)
            _say_calibrations(work)
            made = build_work(work)
    if dry_run:
        _show_plans(plans)
    else:
        _show_bundles(made, work)


def _show_plans(plans: Sequence[Plan]) -> None:
    from canvasrt.build.checks import judge

    verdicts = [judge(plan) for plan in plans]
    rows = [
        {**plan.to_json(), "not_here": verdict.not_here, "hint": verdict.hint}
        for plan, verdict in zip(plans, verdicts, strict=True)
    ]

    def render(console: Any) -> None:
        for plan, verdict in zip(plans, verdicts, strict=True):
            _draw_plan(console, plan, verdict)

    emit(rows, render)


def _draw_plan(console: Any, plan: Plan, verdict: Verdict) -> None:
    from canvasrt.machine import memory_bytes

    need, here = plan.memory, plan.needs
    kernels = f" kernels {size(need.code)}," if need.code else ""
    on_host = f", and {size(need.contexts_on_host)} on the host" if need.contexts else ""
    blind = ", without images" if plan.options.get("vision") is False else ""
    console.print(f"{plan.target.name} → {plan.out}", style="bold")
    console.print(f"  from       {plan.source.path} ({plan.source.made_from['kind']})")
    console.print(f"  builder    {plan.target.builder}, {plan.precision.text} weights")
    console.print(
        f"  serves     up to {plan.requests} at once,"
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
    fits = "fits" if need.total <= there else "does not fit"
    console.print(f"  runs on    {on}, {size(there)}: {fits}")
    less = ""
    if verdict.lighter:
        layers, memory = verdict.lighter
        less = f", {size(memory)} with --layers-per-segment {layers}"
    if here.calibration:
        console.print(f"  calibrates {_calibration(here.calibration)}")
    console.print(
        f"  building   {size(here.memory)} of memory{less}; on disk {size(here.graphs)} of graphs"
        f" and {size(here.engines)} of engines, {size(plan.disk)} at the peak, minus what is in the cache"
    )
    console.print(f"  build here {'no: ' + verdict.not_here if verdict.not_here else 'yes'}")
    if verdict.hint:
        console.print(f"  hint       {verdict.hint}")


def _calibration(needs: CalibrationNeeds) -> str:
    work = needs.work
    return (
        f"{work.prompts} prompts, {work.passes} passes at most in {work.sweeps} sweeps over the weights:"
        f" {size(needs.memory)} of memory, about {duration(needs.seconds())}"
    )


def _say_calibrations(work: Work) -> None:
    """Print how much memory and time calibrations will need, before they start."""
    for kind, plan in {plan.precision.text: plan for plan in work.missing}.items():
        needs = plan.needs.calibration
        if needs is None or work.graphs[kind] is not None:
            continue
        if kind in work.calibrated:
            said = f"calibrated for {kind} by an earlier build"
        else:
            said = f"calibrating for {kind}: {_calibration(needs)}"
        print(said, file=sys.stderr, flush=True)


def _show_bundles(made: Sequence[tuple[Plan, Bundle]], work: Work) -> None:
    rows = [
        {
            "bundle": str(bundle.path),
            "target": plan.target.name,
            "digest": bundle.manifest.digest,
            "bytes": bundle.manifest.total_bytes,
            "reused": found is not None,
            **{name: value for name, value in plan.options.items() if name not in LONG},
        }
        for (plan, bundle), found in zip(made, work.bundles, strict=True)
    ]

    def render(console: Any) -> None:
        for row in rows:
            state = "up to date" if row["reused"] else f"built, {size(row['bytes'])}"
            console.print(f"{row['bundle']}: {row['target']} engines, {state}")

    emit(rows, render)
