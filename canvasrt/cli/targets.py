"""`canvasrt targets`: lists the targets that engines can be built for."""

from __future__ import annotations

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
            "capability",
            "GB",
            "precisions",
            "26B at 8K",
            "here",
        )
        rows = [
            (
                target.name,
                target.capability_text.replace(",", "") if target.capability else "",
                f"{target.memory / 10**9:.0f}" if target.memory else "",
                " ".join(target.precisions),
                size(fit.memory.total) if fit else "too large",
                _here(no_build, no_run),
            )
            for target, fit, no_build, no_run in found
        ]
        console.print(table(columns, rows))

    emit(data, render)


def _here(no_build: str, no_run: str) -> str:
    """Return `runs` if this machine can run a target's engines, `builds` if it can only build them, or else what the
    machine lacks."""
    if no_build:
        return no_build.partition(" (")[0]
    return "builds" if no_run else "runs"
