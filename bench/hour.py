"""Runs everything that only a GPU can answer, the most important first, in one go.

Each step's output and results are written as they come, so a cut at any minute keeps what was there. Started again, it goes on
with the steps that have not ended: `--minutes 9` fits a machine whose commands may run for ten. Nothing is downloaded.
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
_CANVASRT = (sys.executable, "-m", "canvasrt")
# Name: command, and the minutes that it gets. A step that writes results names the file `{out}`.
STEPS: dict[str, tuple[Sequence[str], float]] = {
    "doctor": ((*_CANVASRT, "doctor", "--report", "{out}"), 2),
    "probe-rtx": ((*_BENCH, "probe", "--modules", "tensorrt_rtx", "-o", "{out}"), 8),
    "rows-int4": ((*_BENCH, "rows", "--format", "int4", "-o", "{out}"), 4),
    "parity": ((sys.executable, "-m", "pytest", "-q", "tests/runtime", "-k", "gpu"), 8),
    "probe-tensorrt": ((*_BENCH, "probe", "--modules", "tensorrt", "-o", "{out}"), 8),
    "rows-nvfp4": ((*_BENCH, "rows", "--format", "nvfp4", "-o", "{out}"), 4),
    "rows-fp8": ((*_BENCH, "rows", "--format", "fp8", "-o", "{out}"), 4),
    "rows-bf16": ((*_BENCH, "rows", "--format", "bf16", "-o", "{out}"), 4),
    # In 16 bits the released shape does not fit 24 or 32 GB.
    **{
        f"gpu-{each}": (
            (
                *(*_BENCH, "gpu", "--sides", "tensorrt", "--precision", each),
                *("--work", "{work}", "-o", "{out}"),
            ),
            25,
        )
        for each in ("int4", "fp8")
    },
    # Do batched experts multiply FP8 by FP8, and is attention at head 256 fused?
    "kernels-fp8": (
        (*_CANVASRT, "inspect", "{engines}", "--kernels", "--page", "{page}"),
        2,
    ),
    **{
        f"gpu-{side}": ((*_BENCH, "gpu", "--sides", side, "--work", "{work}", "-o", "{out}"), 25)
        for side in ("tensorrt", "transformers-compiled", "onnxruntime-graphs", "transformers")
    },
}
_STATE = "hour.json"
_GOES_ON = "goes on at the next start"


def measure(
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="For results and logs.")
    ] = ROOT / "bench" / "results" / "hour",
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For graphs and engines: 40 GB.")
    ] = None,
    steps: Annotated[str, typer.Option(help="Some of them, by name.")] = ",".join(STEPS),
    minutes: Annotated[float, typer.Option(metavar="N", help="Of this start.")] = 24 * 60,
) -> None:
    """Run the steps that have not ended yet, in order, until the time is up."""
    end = time.monotonic() + 60 * minutes
    work = work or cache_folder() / "hour"
    out.mkdir(parents=True, exist_ok=True)
    state = out / _STATE
    ended = json.loads(state.read_text()) if state.exists() else {}
    for name in steps.split(","):
        before = ended.get(name, {"how": _GOES_ON, "seconds": 0})
        if before["how"] != _GOES_ON:
            print(f"{name}: {before['how']}, before")
            continue
        begin = time.monotonic()
        if begin >= end:
            break
        command, limit = STEPS[name]
        left = 60 * limit - before["seconds"]
        how = _run(command, min(left, end - begin), out, name, work)
        took = before["seconds"] + time.monotonic() - begin
        if how is None:  # graphs and engines in `work` are kept
            how = f"cut off after {limit:g} minutes" if took >= 60 * limit else _GOES_ON
        ended[name] = {"how": how, "seconds": round(took, 1)}
        whole = state.with_suffix(".partial")
        whole.write_text(json.dumps(ended, indent=1) + "\n")
        whole.replace(state)
        print(f"{name}: {how}", flush=True)


def _run(command: Sequence[str], seconds: float, out: Path, name: str, work: Path) -> str | None:
    """Run one step, with its output in a log; return how it ended, or None if it was cut off."""
    places = {
        "out": out / f"{name}.json",
        "page": out / name,
        "work": work,
        "engines": next(work.glob("*-engines-fp8-*"), work / "engines"),
    }
    words = [word.format(**places) for word in command]
    with (out / f"{name}.log").open("a") as log:
        try:
            done = subprocess.run(
                words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return None
    return "done" if done.returncode == 0 else f"exit code {done.returncode}"
