"""Runs all measurements that need a GPU, the most important first.

Each step's output and results are written at once, so an interruption at any minute loses none of them. The next start
runs the steps that have not ended, and then repeats the failed ones. If a machine limits commands to ten minutes, start
with `--minutes 9`. A step begins only if its whole time limit is left, except the first step of a start. Nothing is
downloaded, and a step that lacks a package fails at once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.results import ROOT
from canvasrt.cache import cache_folder
from canvasrt.containers.processes import die_with_parent, end_group
from canvasrt.errors import UsageError
from canvasrt.staging import signals_raise

_BENCH = (sys.executable, "-m", "bench")
ON_A_GPU = "on_a_gpu"  # part of the names of tests that need a GPU
_CANVASRT = (sys.executable, "-m", "canvasrt")


def _probe(what: str) -> tuple[Sequence[str], float]:
    return (*_BENCH, "probe", "--modules", what, "-o", "{out}"), 8


def _rows(format: str) -> tuple[Sequence[str], float]:
    return (*_BENCH, "rows", "--format", format, "-o", "{out}"), 4


def _gpu(*options: str) -> tuple[Sequence[str], float]:
    return (*_BENCH, "gpu", *options, "--work", "{work}", "-o", "{out}"), 25


# Name → command, and the minutes that it may take. In a command, `{out}` is the file for results.
STEPS: dict[str, tuple[Sequence[str], float]] = {
    "doctor": ((*_CANVASRT, "doctor", "--report", "{out}"), 2),
    "rates": ((*_BENCH, "floor", "--precision", "fp8", "-o", "{out}"), 2),
    "probe-engines": _probe("engines"),
    "rows-int4": _rows("int4"),
    "rows-fp8": _rows("fp8"),
    "parity": ((sys.executable, "-m", "pytest", "-q", "tests/runtime", "-k", ON_A_GPU), 8),
    "probe-sorted": _probe("sorted"),
    # One context only, since each further width needs another profile. 16-bit engines are not among these steps, since
    # they do not fit 24 or 32 GB.
    **{
        f"gpu-{name}": _gpu(
            *("--sides", "tensorrt", "--precision", precision, "--experts", experts),
            *("--batches", "1,4", "--contexts", "4096"),
        )
        for name, precision, experts in (
            ("int4", "int4", "slots"),
            ("int4-sorted", "int4", "sorted"),
            ("fp8", "fp8", "slots"),
        )
    },
    # Do batched experts multiply FP8 by FP8, and is attention at head 256 fused?
    "kernels-fp8": (
        (*_CANVASRT, "inspect", "{engines}", "--kernels", "--page", "{page}"),
        2,
    ),
    "rows-nvfp4": _rows("nvfp4"),
    "rows-bf16": _rows("bf16"),
    "probe-provider": _probe("provider"),
    **{
        f"gpu-{side}": _gpu("--sides", side) for side in ("tensorrt", "onnxruntime", "transformers")
    },
}
_STATE = "hour.json"
_GOES_ON = "goes on at the next start"
_FAILED = "failed: "
_GRACE = 20  # seconds that an interrupted step has to remove its temporary files


def measure(
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="The folder for results and logs.")
    ] = ROOT / "bench" / "results" / "hour",
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder for graphs and engines: 40 GB.")
    ] = None,
    steps: Annotated[str, typer.Option(help="The steps to run, by name.")] = ",".join(STEPS),
    minutes: Annotated[
        float, typer.Option(metavar="N", help="End this start after N minutes.")
    ] = 24 * 60,
) -> None:
    """Run the steps that have not ended yet, in order, until the time limit."""
    end = time.monotonic() + 60 * minutes
    if unknown := set(steps.split(",")) - set(STEPS):
        raise UsageError(
            f"--steps: there is no {min(unknown)!r}", f"give some of {', '.join(STEPS)}"
        )
    work = work or cache_folder() / "hour"
    out.mkdir(parents=True, exist_ok=True)
    state = out / _STATE
    ended: dict[str, dict[str, Any]] = {}
    with suppress(FileNotFoundError, ValueError):  # after a power cut, the file may be empty
        ended = json.loads(state.read_text())
    before = {name: ended.get(name, {"how": _GOES_ON, "seconds": 0}) for name in steps.split(",")}
    began = False
    # Failed steps come last. They may have lacked a package that is installed now.
    for name in sorted(before, key=lambda name: before[name]["how"].startswith(_FAILED)):
        how, took = before[name]["how"], before[name]["seconds"]
        if not how.startswith((_GOES_ON, _FAILED)):
            print(f"{name}: {how} at an earlier start")
            continue
        begin = time.monotonic()
        command, limit = STEPS[name]
        # An unfinished step measures nothing. Only the first step of a start may have a longer limit than the time
        # left.
        if begin >= end or (began and begin + 60 * limit > end):
            print(f"{name}: waits for the next start")
            continue
        took, began = 0 if how.startswith(_FAILED) else took, True
        print(f"{name}: begins", flush=True)
        said = _run(command, min(60 * limit, end - begin), out, name, work)
        took += time.monotonic() - begin
        if said is None:  # the next start continues, with the graphs and engines in `work`
            said = f"cut off after {limit:g} minutes" if took >= 60 * limit else _GOES_ON
        ended[name] = {"how": said, "seconds": round(took, 1)}
        whole = state.with_suffix(".partial")
        whole.write_text(json.dumps(ended, indent=1) + "\n")
        whole.replace(state)
        print(f"{name}: {said}", flush=True)


def _run(command: Sequence[str], seconds: float, out: Path, name: str, work: Path) -> str | None:
    """Run one step, with its output in a log; return how it ended, or None if it was cut off."""
    places = {
        "out": out / f"{name}.json",
        "page": out / name,
        "work": work,
        "engines": next(work.glob("[!.]*-engines-fp8-*"), work / "engines"),
    }
    words = [word.format(**places) for word in command]
    # A repeated step starts over and may be cut off early, so the results of the earlier try are kept under another
    # name.
    with suppress(FileNotFoundError):
        places["out"].replace(out / f"{name}.{len(list(out.glob(f'{name}.*.json')))}.json")
    log = out / f"{name}.log"
    with log.open("a") as file, signals_raise():
        # All processes of a step form a group and end together: a survivor would keep the GPU busy during the next
        # step.
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=die_with_parent(),
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            end_group(process.pid, _GRACE)
    last = " ".join(log.read_text(errors="replace").strip().splitlines()[-1:])[:200]
    # pytest exits with 0 even if it skipped tests that lack a package.
    if code == 0 and not re.search(r"\d skipped", last):
        return "done"
    return f"{_FAILED}exit code {code}: {last}"
