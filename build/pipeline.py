"""From a checkpoint or graphs to one engine bundle a target, reusing what has not changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from canvasrt.build import cpu, tensorrt
from canvasrt.build.checks import check_buildable, check_graphs, check_plan
from canvasrt.build.plan import (
    DEFAULT_MAX_BATCH,
    Plan,
    Source,
    choose_precision,
    graphs_precision,
    plan,
    read_source,
)
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.extras import require
from canvasrt.progress import Progress, no_progress
from canvasrt.staging import check_output, scratch
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
) -> Bundle:
    """Build the engine bundle of one target at `out`.

    `source` is a checkpoint (folder, hub name, `demo`), which is exported first, or a graph bundle. A
    bundle that is there already, made from the same with the same options, is returned as it is.
    """
    targets = [find_target(target) if isinstance(target, str) else target]
    plans = plan_all(source, targets, out, precision, max_context, max_batch, progress)
    ((_, bundle),) = build_all(plans, progress)
    return bundle


def build_all(plans: Sequence[Plan], progress: Progress | None = None) -> list[tuple[Plan, Bundle]]:
    """Carry out plans that share a source; the checkpoint is exported once a precision.

    Everything that can be refused is refused before the first byte is written.
    """
    report = progress or no_progress
    bundles = [made.existing() for made in plans]
    for made, found in zip(plans, bundles, strict=True):
        if found is None:
            check_plan(made)
            check_output(made.out)
    missing = [number for number, found in enumerate(bundles) if found is None]
    for precision in dict.fromkeys(plans[number].precision for number in missing):
        group = [number for number in missing if plans[number].precision == precision]
        first = plans[group[0]]
        with _graphs(first.source, precision, first.out, report) as graphs:
            for number in group:
                builder = BUILDERS[plans[number].target.builder]
                bundles[number] = builder(plans[number], graphs, report)
    return [(made, bundle) for made, bundle in zip(plans, bundles, strict=True) if bundle]


def plan_all(
    source: Path | str,
    targets: Sequence[Target],
    out: Path | str,
    precision: str | None,
    max_context: int | None,
    max_batch: int,
    progress: Progress | None = None,
    check: bool = True,
) -> list[Plan]:
    """One plan a target: a single one writes `out`, several write `out/<target>`.

    With `check`, a target that cannot be built for here is refused before the source is read through.
    """
    of_graphs = graphs_precision(source)
    shared = any(precision in target.precisions for target in targets)
    precisions = [
        # A CPU has a precision of its own, which the GPUs' beside it does not change.
        choose_precision(
            target, None if shared and target.capability is None else precision, of_graphs
        )
        for target in targets
    ]
    for target, chosen in zip(targets, precisions, strict=True) if check else ():
        check_buildable(target, chosen)
        check_graphs(target, chosen, of_graphs)
    opened = read_source(source, progress)
    folders = [Path(out)] if len(targets) == 1 else [Path(out) / each.name for each in targets]
    return [
        plan(opened, target, folder, chosen, max_context, max_batch)
        for target, folder, chosen in zip(targets, folders, precisions, strict=True)
    ]


@contextlib.contextmanager
def _graphs(source: Source, precision: str, out: Path, report: Progress) -> Iterator[Bundle]:
    """The source's graphs; those of a checkpoint live beside `out` while engines are made."""
    if source.graphs is not None:
        yield source.graphs
        return
    require("torch", "export")
    require("onnx", "export")
    from canvasrt.export.graphs import export

    out = out.resolve()
    with scratch(out.parent / f"{out.name}.graphs") as tmp:
        folder = tmp / "graphs"
        export(
            str(source.path),
            folder,
            precision=precision,
            progress=lambda done, total: report(f"exporting graphs ({precision})", done, total),
        )
        yield load_bundle(folder, kind="graphs", check=False)
