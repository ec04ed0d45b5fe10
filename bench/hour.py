"""Runs everything that only a GPU can answer, the most important first, in one go.

Each step's output and results are written as they come, so a cut at any minute keeps what was there. Started again, it goes on
with the steps that have not ended. Nothing is downloaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench.results import ROOT
from canvasrt.cache import cache_folder

_BENCH = (sys.executable, "-m", "bench")
# Name: command, and the minutes that it gets. A step that writes results names the file `{out}`.
STEPS: dict[str, tuple[Sequence[str], float]] = {
    "doctor": ((sys.executable, "-m", "canvasrt", "doctor", "--report", "{out}"), 2),
    "probe-rtx": ((*_BENCH, "probe", "--modules", "tensorrt_rtx", "-o", "{out}"), 8),
    "rows-int4": ((*_BENCH, "rows", "--format", "int4", "-o", "{out}"), 4),
    "parity": ((sys.executable, "-m", "pytest", "-q", "tests/runtime", "-k", "gpu"), 8),
    "probe-tensorrt": ((*_BENCH, "probe", "--modules", "tensorrt", "-o", "{out}"), 8),
    "rows-nvfp4": ((*_BENCH, "rows", "--format", "nvfp4", "-o", "{out}"), 4),
    "rows-fp8": ((*_BENCH, "rows", "--format", "fp8", "-o", "{out}"), 4),
    "rows-bf16": ((*_BENCH, "rows", "--format", "bf16", "-o", "{out}"), 4),
    **{
        f"gpu-{side}": ((*_BENCH, "gpu", "--sides", side, "--work", "{work}", "-o", "{out}"), 25)
        for side in ("tensorrt", "transformers-compiled", "onnxruntime-graphs", "transformers")
    },
}
_STATE = "hour.json"


def measure(
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="For results and logs.")
    ] = ROOT / "bench" / "results" / "hour",
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For graphs and engines: 40 GB.")
    ] = None,
    steps: Annotated[str, typer.Option(help="Some of them, by name.")] = ",".join(STEPS),
) -> None:
    """Run the steps that have not ended yet, in order."""
    work = work or cache_folder() / "hour"
    out.mkdir(parents=True, exist_ok=True)
    state = out / _STATE
    ended = json.loads(state.read_text()) if state.exists() else {}
    for name in steps.split(","):
        if name in ended:
            print(f"{name}: {ended[name]['how']}, before")
            continue
        command, minutes = STEPS[name]
        begin = time.monotonic()
        how = _run(command, minutes, out, name, work)
        ended[name] = {"how": how, "seconds": round(time.monotonic() - begin)}
        whole = state.with_suffix(".partial")
        whole.write_text(json.dumps(ended, indent=1) + "\n")
        whole.replace(state)
        print(f"{name}: {how}", flush=True)


def _run(command: Sequence[str], minutes: float, out: Path, name: str, work: Path) -> str:
    """Run one step, with its output in a log; return how it ended."""
    places = {"out": out / f"{name}.json", "work": work}
    words = [word.format(**places) for word in command]
    with (out / f"{name}.log").open("w") as log:
        try:
            done = subprocess.run(
                words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=60 * minutes
            )
        except subprocess.TimeoutExpired:
            return f"cut off after {minutes:g} minutes"
    return "done" if done.returncode == 0 else f"exit code {done.returncode}"
