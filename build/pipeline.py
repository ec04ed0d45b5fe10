"""From a checkpoint or graphs to one engine bundle a target, reusing what has not changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from canvasrt.build import cpu, tensorrt
from canvasrt.build.checks import check_buildable, check_plan, check_space
from canvasrt.build.graphs import graphs_of
from canvasrt.build.plan import DEFAULT_MAX_BATCH, Adapters, Options, Plan, plan
from canvasrt.build.precision import choose
from canvasrt.build.source import read_source, source_precision
from canvasrt.bundle import Bundle
from canvasrt.errors import UsageError
from canvasrt.progress import Progress, no_progress
from canvasrt.staging import check_output
from canvasrt.targets import Target, find_target

Builder = Callable[[Plan, Bundle, Progress], Bundle]

# Builder of the target table → the function that makes its engines.
BUILDERS: dict[str, Builder] = {
    "onnxruntime": cpu.build_engines,
    "tensorrt-rtx": tensorrt.build_engines,
    "tensorrt": tensorrt.build_engines,
}


def build(
    source: Path | str,
    target: Target | str,
    out: Path | str,
    precision: str | None = None,
    max_context: int | None = None,
    max_batch: int = DEFAULT_MAX_BATCH,
    progress: Progress | None = None,
    layers_per_segment: int | None = None,
    calibration: Path | None = None,
    adapters: Adapters = (),
) -> Bundle:
    """Build the engine bundle of one target at `out`.

    Args: `source` a checkpoint (folder, hub name, `demo`), which is exported first, or a graph bundle; `precision`
    `fp32`, `bf16`, a recipe's name or a recipe file; `calibration` a file of prompts for a recipe; `adapters`
    folders of LoRA adapters, each with what it is scaled by. A bundle that is there already, made from the same with the same options, is returned as it is.
    """
    targets = [find_target(target) if isinstance(target, str) else target]
    options = Options(precision, max_context, max_batch, layers_per_segment, calibration, adapters)
    ((_, bundle),) = build_all(plan_all(source, targets, out, options, progress), progress)
    return bundle


def build_all(plans: Sequence[Plan], progress: Progress | None = None) -> list[tuple[Plan, Bundle]]:
    """Carry out plans that share a source; what they have in common is exported and quantized once.

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
    options: Options,
    progress: Progress | None = None,
    check: bool = True,
) -> list[Plan]:
    """One plan a target: a single one writes `out`, several write `out/<target>`.

    With `check`, a target that cannot be built for here is refused before the source is read through.
    """
    precisions = choose(targets, options.precision, source_precision(source))
    if options.calibration is not None and not any(each.is_quantized for each in precisions):
        raise UsageError(
            f"--calibration is for weights that are quantized, and these stay {precisions[0].text}",
            "name a recipe with --precision, or leave --calibration out",
        )
    for target in targets if check else ():
        check_buildable(target)
    opened = read_source(source, progress)
    folders = [Path(out)] if len(targets) == 1 else [Path(out) / each.name for each in targets]
    return [
        plan(
            opened,
            target,
            folder,
            precision,
            options.max_context,
            options.max_batch,
            options.layers_per_segment,
            options.calibration,
            options.adapters,
        )
        for target, folder, precision in zip(targets, folders, precisions, strict=True)
    ]
