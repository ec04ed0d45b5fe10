"""`canvasrt targets`: lists what engines can be built for."""

from typing import Any

from canvasrt.cli import options
from canvasrt.console import emit, size, table


def targets(as_json: options.AsJson = False) -> None:
    """List the targets, how each would run the released model, and what this machine can build and run."""
    from canvasrt.build.fit import released_fit
    from canvasrt.machine import builds_here, runs_here
    from canvasrt.targets import TARGETS

    found = [
        (target, released_fit(target), builds_here(target), runs_here(target)) for target in TARGETS
    ]
    data = [
        {
            **target.to_json(),
            "released_model": fit.to_json() if fit else None,
            "builds_here": not no_build,
            "builds_here_not": no_build or None,
            "runs_here": not no_run,
            "runs_here_not": no_run or None,
        }
        for target, fit, no_build, no_run in found
    ]

    def render(console: Any) -> None:
        columns = (
            "target",
            "GPU",
            "memory",
            "cap.",
            "builder",
            "precisions",
            "26B at 8K",
            "built here",
            "runs here",
        )
        rows = [
            (
                target.name,
                target.gpu,
                "-" if target.memory is None else size(target.memory),
                target.capability_text,
                target.builder,
                ", ".join(target.precisions),
                f"{fit.precision}, {size(fit.memory.total)}" if fit else "does not fit",
                no_build or "yes",
                no_run or "yes",
            )
            for target, fit, no_build, no_run in found
        ]
        console.print(table(columns, rows))

    emit(data, as_json, render)
