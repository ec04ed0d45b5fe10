"""Measures with `canvasrt verify`: the demo's quality under each recipe and with one kind of matrix quantized at a
time, and the calibration of its probabilities."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench import results
from canvasrt.errors import CanvasError
from canvasrt.types import Json

RECIPES = ("fp8", "nvfp4-experts", "nvfp4-mixed", "int4", "int4-mixed", "nvfp4")
UNDERTRAINED = str(results.ROOT / "tests" / "data" / "undertrained")
MATRICES = (
    *("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down"),
    *("experts.gate_up", "experts.down", "table"),
)


def measure(
    work: Annotated[
        Path, typer.Option(help="A folder that keeps engines and reports for later runs.")
    ],
    questions: Annotated[int, typer.Option(help="Questions per task, for the recipes.")] = 500,
    kinds: Annotated[
        bool, typer.Option("--kinds", help="Quantize one kind of matrix at a time instead.")
    ] = False,
    out: results.Out = None,
) -> None:
    """Build and verify the demo for a CPU. It takes three minutes per recipe on one core."""
    work.mkdir(parents=True, exist_ok=True)
    if kinds:
        results.report({"one kind": list(_kinds(work))}, out)
        return
    asked = ("--reference", "demo", "--questions", str(questions))
    figures = {
        "recipes": [_recipe(name, _report(name, name, asked, work)) for name in RECIPES],
        "calibration": list(_calibration(work)),
    }
    results.report(figures, out)


def _report(
    name: str, precision: str, options: Sequence[str], work: Path, checkpoint: str = "demo"
) -> Json:
    """Return `verify`'s report on a checkpoint at this precision. Builds and verifies only if `work` lacks the
    report."""
    engines, folder = work / f"engines-{name.partition(',')[0]}", work / f"report-{name}"
    file = folder / "report.json"
    if not file.exists():
        if not engines.exists():
            build = ("build", checkpoint, "--target", "cpu", "--precision", precision)
            _canvasrt(*build, "-o", str(engines))
        # The exit code is 1 if limits are exceeded. The report says so, too.
        _canvasrt("verify", str(engines), *options, "--report", str(folder), ends=(0, 1))
    found: Json = json.loads(file.read_text())
    return found


def _canvasrt(*words: str, ends: Sequence[int] = (0,)) -> None:
    done = subprocess.run([sys.executable, "-m", "canvasrt", *words], stdout=subprocess.DEVNULL)
    if done.returncode not in ends:
        raise CanvasError(f"canvasrt {words[0]} failed", "see its message above")


def _recipe(name: str, report: Json) -> Json:
    marks, pace, steps = report["answers"]["all"], report["pace"], report["steps"]
    return {
        "recipe": f"`{name}`",
        "right": marks["bundle"]["share"],
        "lost per 100": _interval(100 * marks["loss"], *(100 * x for x in marks["loss_interval"])),
        "more steps, %": _interval(
            100 * pace["steps_growth"], *(100 * x for x in pace["steps_growth_interval"])
        ),
        **{f"KL, {phase}": f"{each['kl_mean']:.1e}" for phase, each in steps["by_phase"].items()},
        "same best token": f"{steps['all']['argmax_agreement']:.2%}",
        "within limits": "yes" if report["ok"] else "no",
    }


def _interval(middle: float, low: float, high: float) -> str:
    return f"{middle:+.2f} ({low:+.2f} to {high:+.2f})"


def _kinds(work: Path) -> Iterator[Json]:
    """Yield the mean KL divergence in nats with one kind of matrix quantized. The embedding table cannot be NVFP4."""
    for matrix in MATRICES:
        weights = "table" if matrix == "table" else f"layers.*.{matrix}"
        row = {"quantized": f"`{matrix}`"}
        for format in ("fp8",) if matrix == "table" else ("fp8", "nvfp4"):
            name = f"{format}-{matrix}"
            recipe = {"schema": 1, "name": name, "description": "One kind of matrix."}
            recipe |= {"quantize": [{"weights": weights, "format": format}]}
            file = work / f"{name}.yaml"
            file.write_text(json.dumps(recipe))
            report = _report(name, str(file), ("--reference", "demo", "--questions", "0"), work)
            row[format.upper()] = f"{report['steps']['all']['kl_mean']:.1e}"
        yield row


def _calibration(work: Path) -> Iterator[Json]:
    """Yield how far probabilities of closed questions are from the share of right answers, with one draw and with
    eight."""
    cases = [("demo", each) for each in ("fp32", "int4", "nvfp4")]
    for checkpoint, precision in [*cases, (UNDERTRAINED, "fp32")]:
        row: Json = {"model": f"`{Path(checkpoint).name}`, {precision}"}
        for samples in (1, 8):
            name = f"{Path(checkpoint).name}-{precision},{samples}"
            options = ("--decisions", "demo", "--samples", str(samples))
            found = _report(name, precision, options, work, checkpoint)["all"]
            chance, draws = found["ece_by_chance"], "1 draw" if samples == 1 else "8 draws"
            row[f"right, {draws}"] = f"{found['right']:.1%}"
            row[f"ECE, {draws}"] = f"{found['ece']:.3f}"
            row[f"by chance, {draws}"] = f"{chance['mean']:.3f} ({chance['p95']:.3f})"
        yield row
