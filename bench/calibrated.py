"""Measures a build from a bf16 checkpoint, calibration included, and compares it with the plan's estimates."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench import results
from bench.build import Sampler
from bench.checkpoint import Shape, write_apart
from canvasrt.build.options import BuildOptions, choose_precisions
from canvasrt.pipeline import build_all, plan_all
from canvasrt.progress import listening
from canvasrt.targets import Target, find_target
from canvasrt.types import Json


def measure(
    shape: Shape = "released",
    layers: Annotated[int | None, typer.Option(help="Default: the shape's own number.")] = None,
    target: str = "rtx-5090",
    precision: Annotated[str | None, typer.Option(help="A recipe; default: the target's.")] = None,
    prompts: Annotated[int, typer.Option(help="Calibration prompts, of 200 tokens each.")] = 2,
    steps: Annotated[int, typer.Option(help="Denoising steps of a block.")] = 12,
    out: results.Out = None,
) -> None:
    """Write a random checkpoint, build it for one target, and remove all files."""
    found = find_target(target)
    (chosen,) = choose_precisions([found], precision, None)
    with tempfile.TemporaryDirectory(prefix="canvasrt-calibrated-") as work:
        checkpoint, made, file = Path(work, "checkpoint"), Path(work, "made"), Path(work, "prompts")
        os.environ["CANVASRT_CACHE"] = str(made / "cache")
        model = write_apart(checkpoint, shape, layers)
        settings = checkpoint / "generation_config.json"
        said = json.loads(settings.read_text()) | {"max_denoising_steps": steps}
        settings.write_text(json.dumps(said))
        ids = np.random.default_rng(0).integers(100, model.vocab_size, (prompts, 200))
        file.write_text("".join(json.dumps({"prompt_ids": row}) + "\n" for row in ids.tolist()))
        options = BuildOptions(precision, calibration=file if chosen.is_calibrated else None)
        stages, row = build(checkpoint, found, made, options)
    about = {"layers": len(model.layers), "recipe": chosen.text, "target": target}
    results.report({"shape": shape, "builds": [about | row], "stages": stages}, out)


def build(
    checkpoint: Path, target: Target, made: Path, options: BuildOptions
) -> tuple[list[Json], Json]:
    """Build engines in `made`, with a separate cache. Return a row per stage, and the plan's estimates with the
    measured figures."""
    begun: dict[str, float] = {"hashing": time.monotonic()}

    def show(what: str, done: int, total: int) -> None:
        begun.setdefault(what.split()[0], time.monotonic())

    with Sampler(made) as sampler, listening(show):
        (plan,) = plan_all(checkpoint, [target], made / "engines", options)
        needs = plan.needs
        expected = needs.calibration.seconds() if needs.calibration else None
        build_all([plan])
    ends = [*[*begun.values()][1:], time.monotonic()]
    took = {name: end - begun[name] for name, end in zip(begun, ends, strict=True)}
    stages = [{"stage": name, "seconds": round(each, 1)} for name, each in took.items()]
    return stages, {
        "memory, GB": sampler.whole.resident / 1e9,
        "memory planned": needs.memory / 1e9,
        "disk, GB": sampler.disk / 1e9,
        "disk planned": plan.disk / 1e9,
        "calibrating, s": took.get("calibrating"),
        "calibrating planned": expected,
        "quantizing, s": took.get("quantizing"),
    }
