"""Creates one plan, as `plan_all` does before it checks plans."""

from __future__ import annotations

from pathlib import Path

from canvasrt.build.options import DEFAULT_OPTIONS, BuildOptions
from canvasrt.build.plan import Plan, make_plans
from canvasrt.build.source import Source
from canvasrt.targets import find_target


def plan(
    source: Source, target: str, out: Path | str = "out", options: BuildOptions = DEFAULT_OPTIONS
) -> Plan:
    (made,) = make_plans(source, [find_target(target)], out, options)
    return made
