"""Writes a measurement's results as JSON and as tables: machine, commit, command and figures."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from canvasrt import extras
from canvasrt.machine import gpus, memory_bytes
from canvasrt.types import Json

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = (
    *("canvasrt", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx"),
    *("torch", "transformers", "cuda-bindings"),
)
Out = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        metavar="FILE",
        help="Also write the results to this file, in the form of bench/results/.",
    ),
]


def attempt(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or `{"skipped": why}`, so that one failure does not end other measurements."""
    try:
        return work()
    except Exception as error:  # any exception, since runs on a GPU are expensive to repeat
        return skipped(error)


def skipped(error: Exception) -> Json:
    """Return the entry for a measurement that failed."""
    text = str(error).strip().splitlines()
    return {"skipped": f"{type(error).__name__}: {text[0] if text else 'no reason given'}"}


def write(figures: Json, out: Path | None) -> None:
    """Write the figures to `out` with the machine, commit and command. A list of dicts is a table."""
    if out is not None:
        data = {
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "commit": _git("describe", "--always", "--dirty", "--exclude", "*"),
            "command": " ".join(["python -m bench", *sys.argv[1:]]),
            "figures": figures,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        whole = out.with_suffix(".partial")
        whole.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        whole.replace(out)  # atomic: an interruption leaves the earlier results


def report(figures: Json, out: Path | None) -> None:
    """Print the figures, and write them to `out`."""
    write(figures, out)
    print(tables(figures), end="")
    if out is not None:
        print(out)


def machine() -> Json:
    """Return the processor, the memory, the GPUs, and the versions of drivers and libraries."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "gpus": [gpu.to_json() for gpu in gpus()],
        "versions": {name: found for name in DISTRIBUTIONS if (found := extras.version(name))},
    }


def tables(figures: Json) -> str:
    """Return Markdown: a table for each list of rows, and a line for every other value."""
    parts = []
    for title, value in figures.items():
        if not (isinstance(value, list) and value and isinstance(value[0], dict)):
            if value not in (None, [], {}):
                parts.append(f"{title}: {_cell(value)}")
            continue
        parts.append(f"{title}:\n\n{table(value)}")
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Json]) -> str:
    """Return Markdown: a table of the rows, without a newline at its end."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    lines += [f"| {' | '.join(_cell(row.get(head)) for head in heads)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value)


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or None
