"""The measurements as JSON and as Markdown tables."""

from __future__ import annotations

import json
from pathlib import Path

from bench.runner import ROUTINGS
from canvasrt.types import Json

FILES = ("gpu.json", "gpu.md")


def write(data: Json, out: Path) -> tuple[Path, Path]:
    """Write `FILES` to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    files = out / FILES[0], out / FILES[1]
    files[0].write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    files[1].write_text(markdown(data), encoding="utf-8")
    return files


def markdown(data: Json) -> str:
    """Return a run's tables."""
    parts = [_heading(data), _passes(data), _floor(data), _uneven(data)]
    parts += [_generation(data), _segments(data)]
    parts += [_experts(data), _loads(data), _skipped(data)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(data: Json) -> str:
    shape, versions = data["shape"], data["versions"]
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return (
        f"## {data['device']}, {data['date']}\n\n"
        f"The shape `{shape['name']}`: {shape['layers'] * shape['copies']} layers, {shape['precision']}, "
        f"random weights ({data['weight_bytes'] / 1e9:.2f} GB). {_engines(data)}{known}. "
        f"`{data['command']}`"
    )


def _engines(data: Json) -> str:
    """Return how the engines, and with them the floor, differ from the other sides."""
    engines = data.get("engines")
    if not engines:
        return ""
    return (
        f"Only the side tensorrt and the floor: {engines['precision']} "
        f"({engines['weight_bytes'] / 1e9:.2f} GB), {engines['calibration']}. "
    )


def _sides(data: Json) -> dict[str, Json]:
    return {name: side for name, side in data["sides"].items() if "skipped" not in side}


def _passes(data: Json) -> str:
    sides = _sides(data)
    keys = [(p["context"], p["batch"]) for p in next(iter(sides.values()), {}).get("passes", ())]
    rows = []
    for context, batch in keys:
        cells = [
            _find(side["passes"], "ms", context=context, batch=batch) for side in sides.values()
        ]
        floor = data["floor"].get(str(batch), {}).get("floor")
        rows.append([f"{context:,}", str(batch), *cells, _number(floor)])
    return _table(["context", "batch", *sides, "floor"], rows, "Milliseconds per denoising pass")


def _uneven(data: Json) -> str:
    rows = []
    for name, side in _sides(data).items():
        for run in side["passes"]:
            if "padded_ms" in run:
                times = [run[f"{routing}_ms"] for routing in ROUTINGS[1:]]
                ratios = [f"{each:.4g} ({each / run['ms']:.2f} ×)" for each in times]
                rows.append([name, f"{run['context']:,}", str(run["batch"]), *ratios])
    heads = ["side", "context", "batch", "few tokens", "half padding"]
    return _table(
        heads, rows, "Milliseconds per pass whose tokens route alike, and to even routing"
    )


def _floor(data: Json) -> str:
    rates = data["rates"]
    if "skipped" in rates:
        return ""
    copied = f"The floor: {rates['copy_bytes_per_second'] / 1e9:,.0f} GB/s of copying"
    if "launch_seconds" in rates:
        copied += f", {1e6 * rates['launch_seconds']:.1f} µs per launch"
    if "matrix" not in rates:
        return f"{copied}, measured; products are left out."
    operations = rates["matrix_operations_per_second"] / 1e12
    return f"{copied} and {operations:,.1f} TFLOP/s ({rates['matrix']}), both measured."


def _generation(data: Json) -> str:
    rows = []
    for name, side in _sides(data).items():
        for run in side["generation"]:
            names = ("tokens_per_second", "tokens_per_second_of_steps_alone", "first_tokens_ms")
            rows.append([name, str(run["batch"]), *(_number(run.get(each)) for each in names)])
    steps = data["shape"]["steps"]
    heads = ["side", "batch", "tokens/s", "tokens/s of the steps alone", "first tokens, ms"]
    return _table(heads, rows, f"Two blocks at {steps} fixed steps")


def _segments(data: Json) -> str:
    rows = []
    for name, side in _sides(data).items():
        for run in side["segments"]:
            if "skipped" in run["parts"]:
                continue
            body = [ms for part, ms in run["parts"].items() if part != "head"]
            head = run["parts"].get("head")
            rows.append(
                [
                    name,
                    f"{run['context']:,}",
                    *(_number(value) for value in (min(body), max(body), sum(body), head)),
                ]
            )
    heads = ["side", "context", "fastest body", "slowest body", "all bodies", "head"]
    return _table(heads, rows, "Milliseconds by segment, batch 1")


def _experts(data: Json) -> str:
    made = {name: runs for name, runs in data["experts"].items() if "skipped" not in runs}
    sizes = {each for runs in made.values() for found in runs.values() for each in found}
    columns = sorted(sizes, key=lambda each: (not each.isdigit(), each.zfill(9)))
    rows = [
        [name, str(tokens), *(_number(found.get(each)) for each in columns)]
        for name, runs in made.items()
        for tokens, found in runs.items()
    ]
    heads = ["side", "tokens", *columns]
    title = f"One layer's experts in {data['shape']['precision']}, milliseconds by capacity"
    return _table(heads, rows, title)


def _loads(data: Json) -> str:
    lines = [data["routing"]]
    for name, side in _sides(data).items():
        spans = [
            f"{min(loads)} to {max(loads)} ({routing})"
            for routing, loads in side["expert_loads"].items()
            if isinstance(loads, list) and loads
        ]
        if spans:
            lines.append(
                f"{name}: the fullest expert of a layer got {', '.join(spans)} tokens, the mean of all experts is "
                f"{data['mean_load']:g}; memory {_bytes(side['memory_bytes'])}."
            )
    return "\n".join(lines)


def _skipped(data: Json) -> str:
    lines = [
        f"- {name}: {side['skipped']}" for name, side in data["sides"].items() if "skipped" in side
    ]
    lines += [
        f"- experts alone, {name}: {runs['skipped']}"
        for name, runs in data["experts"].items()
        if "skipped" in runs
    ]
    for name, side in _sides(data).items():
        for kind in ("passes", "generation"):
            lines += [
                f"- {name}, {kind} at {_where(run)}: {run['skipped']}"
                for run in side[kind]
                if "skipped" in run
            ]
    return "Not measured:\n\n" + "\n".join(lines) if lines else ""


def _where(run: Json) -> str:
    return ", ".join(f"{key} {run[key]}" for key in ("batch", "context") if key in run)


def _find(runs: list[Json], name: str, **where: int) -> str:
    found = (run for run in runs if all(run[key] == value for key, value in where.items()))
    return _number(next(found, {}).get(name))


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 1 else f"{value:.1f}"


def _bytes(value: int | None) -> str:
    return "of the host" if value is None else f"{value / 1e9:.1f} GB"


def _table(heads: list[str], rows: list[list[str]], title: str) -> str:
    if not rows:
        return ""
    lines = [
        f"### {title}",
        "",
        f"| {' | '.join(heads)} |",
        f"| {' | '.join('---' for _ in heads)} |",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
