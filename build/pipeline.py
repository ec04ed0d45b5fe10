"""From a checkpoint or graphs to one engine bundle a target, reusing what has not changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from canvasrt.build import cpu
from canvasrt.build.plan import DEFAULT_MAX_BATCH, Plan, Source, plan, read_source
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.errors import CanvasError
from canvasrt.extras import require
from canvasrt.progress import Progress, no_progress
from canvasrt.staging import check_output, scratch
from canvasrt.targets import Target, find_target

Builder = Callable[[Plan, Bundle, Progress], Bundle]

# Builder of the target table → the function that makes its engines.
BUILDERS: dict[str, Builder] = {"onnxruntime": cpu.build_engines}


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
    opened = read_source(source, progress)
    made = plan(opened, target, out, precision, max_context, max_batch)
    ((_, bundle),) = build_all([made], progress)
    return bundle


def build_all(plans: Sequence[Plan], progress: Progress | None = None) -> list[tuple[Plan, Bundle]]:
    """Carry out plans that share a source; the checkpoint is exported at most once.

    Everything that can be refused is refused before the first byte is written.
    """
    report = progress or no_progress
    existing = [made.existing() for made in plans]
    for made, found in zip(plans, existing, strict=True):
        if found is None:
            check_buildable(made.target)
            check_output(made.out)
    if None not in existing:
        return [(made, found) for made, found in zip(plans, existing, strict=True) if found]
    with _graphs(plans[0].source, plans[0].out, report) as graphs:
        return [
            (made, found or BUILDERS[made.target.builder](made, graphs, report))
            for made, found in zip(plans, existing, strict=True)
        ]


def plan_all(
    source: Path | str,
    targets: Sequence[Target],
    out: Path | str,
    precision: str | None,
    max_context: int | None,
    max_batch: int,
    progress: Progress | None = None,
) -> list[Plan]:
    """One plan a target: a single one writes `out`, several write `out/<target>`."""
    opened = read_source(source, progress)
    folders = [Path(out)] if len(targets) == 1 else [Path(out) / each.name for each in targets]
    return [
        plan(opened, target, folder, precision, max_context, max_batch)
        for target, folder in zip(targets, folders, strict=True)
    ]


def check_buildable(target: Target) -> None:
    """Raise CanvasError when this version has no builder for the target."""
    if target.builder not in BUILDERS:
        available = [name for name in ("cpu",) if find_target(name).builder in BUILDERS]
        raise CanvasError(
            f"engines for {target.name} are not built by this version yet:"
            f" it has no {target.builder} builder",
            f"build for {', '.join(available)}; --dry-run shows the plan for any target",
        )


@contextlib.contextmanager
def _graphs(source: Source, out: Path, report: Progress) -> Iterator[Bundle]:
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
            progress=lambda done, total: report("exporting graphs", done, total),
        )
        yield load_bundle(folder, kind="graphs", check=False)
