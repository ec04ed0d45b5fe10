"""Measures how much a calibration gains from more prompts and steps, on random weights of a real shape.

With each calibration's scales, inputs are rounded as the recipe says; weights are not. The mean KL divergence, at
temperature `HEAT`, is the expected rise of the loss on a token that the model draws itself.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from bench import results
from bench.checkpoint import Shape, write_apart
from canvasrt.calibration_prompts import CalibrationPrompts
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.export.checkpoint import Checkpoint
from canvasrt.export.quantize.calibrate import calibrate
from canvasrt.export.quantize.network import StreamedNetwork, device_here
from canvasrt.export.quantize.observed_part import Observed
from canvasrt.export.quantize.saved_sweeps import SavedSweeps
from canvasrt.export.quantize.stored_weights import CheckpointWeights
from canvasrt.fidelity.compare import NOTHING, divergence
from canvasrt.formats import FORMATS
from canvasrt.progress import report
from canvasrt.recipes.recipe import load_recipe
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseInput, EncodeInput
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.types import Json

HELD_OUT, HELD_OUT_STEPS = 2, 4
HEAT = 2.0  # at 1, a random model draws the tokens of its canvas again, with a probability near one
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def measure(
    runs: Annotated[
        str, typer.Option(help="Calibrations to compare, as prompts x steps.")
    ] = "1x12,4x12,16x12,4x3,4x48",
    shape: Shape = "released-8k",
    layers: Annotated[int | None, typer.Option(help="Default: the shape's own number.")] = 2,
    precision: str = "nvfp4-mixed",
    out: results.Out = None,
) -> None:
    """Write a random checkpoint, and calibrate it once per run. Its files are removed."""
    wanted = [tuple(map(int, each.split("x"))) for each in runs.split(",")]
    recipe = load_recipe(precision)
    with tempfile.TemporaryDirectory(prefix="canvasrt-canvases-") as work:
        checkpoint, file = Path(work, "checkpoint"), Path(work, "prompts")
        model = write_apart(checkpoint, shape, layers)
        _, sampler = ModelConfig.from_checkpoint(checkpoint)
        random = np.random.default_rng(0)
        most = max(prompts for prompts, _ in wanted)
        ids = random.integers(100, model.vocab_size, (most + HELD_OUT, 200))
        file.write_text("".join(json.dumps({"prompt_ids": row}) + "\n" for row in ids.tolist()))
        weights = CheckpointWeights(Checkpoint(checkpoint), model, sampler, torch.bfloat16, held={})
        formats = {name: each.format for name, each in recipe.formats(model).items()}
        forced: list[list[np.ndarray]] = []
        expected = _logits(weights, ids[most:], forced, Observed(), Path(work))
        rows: list[Json] = []
        found: list[dict[str, float]] = []
        for prompts, steps in wanted:
            weights.sampler = replace(sampler, max_denoising_steps=steps)
            some = replace(recipe, calibration=replace(recipe.calibration, prompts=prompts))
            source = CalibrationPrompts.of(file, some, model, weights.sampler, {}, {})
            room = Path(work, f"{prompts}x{steps}")
            room.mkdir()
            found.append(calibrate(weights, some, source, room).amax)
            rounding = _Rounding(formats, found[-1])
            logits = _logits(weights, ids[most:], forced, rounding, room)
            rows.append({"prompts": prompts, "steps": steps} | _compared(expected, logits))
            largest = {name: max(each[name] for each in found) for name in found[0]}
            for row, amax in zip(rows, found, strict=True):
                shares = [amax[name] / largest[name] for name in largest]
                row |= {"lowest amax": min(shares), "median amax": float(np.median(shares))}
            about = {"shape": shape, "layers": len(model.layers), "precision": precision}
            results.write({"model": about, "calibrations": rows}, out)
    results.report({"model": about, "calibrations": rows}, out)


class _Rounding(Observed):
    """Rounds the inputs instead of recording them."""

    def __init__(self, formats: dict[str, str], amax: dict[str, float]) -> None:
        super().__init__()
        self._formats, self._largest = formats, amax

    def note(self, name: str, x: Tensor) -> None:
        """Round `x` in place, if the recipe has scales for it."""
        if name not in self._largest:
            return
        if FORMATS[self._formats[name]].input_quantizer is None:
            x.copy_(_e4m3(x, self._largest[name] / 448))
        else:
            blocks = x.reshape(-1, 16)
            scale = _e4m3(blocks.abs().amax(1, True) / 6, self._largest[name] / (6 * 448))
            codes = blocks.abs() / scale.clamp(min=1e-30)
            nearest = torch.bucketize(codes, (_E2M1[1:] + _E2M1[:-1]) / 2)
            x.copy_((_E2M1[nearest] * scale).copysign(blocks).view(x.shape))

    def check(self) -> None:
        """There is nothing to check."""


def _e4m3(x: Tensor, scale: float) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32) * scale


def _logits(
    weights: CheckpointWeights,
    prompts: np.ndarray,
    forced: list[list[np.ndarray]],
    observed: Observed,
    room: Path,
) -> list[Tensor]:
    """Denoise a block after each prompt. Return the logits of every step and prompt.

    forced: the canvases after every step. If it is empty, it is filled with those of this run.
    """
    network: Any = StreamedNetwork(
        weights, len(prompts), SavedSweeps(room / "compared", device_here()), observed
    )
    config, found = weights.config, []
    head = network._head.module
    project = head.project

    def projected(x: Tensor) -> Tensor:
        raw = project(x)
        found.append(head.capped(raw)[0])
        return raw

    head.project = projected
    params = SamplingParams.from_defaults(
        weights.sampler, config, max_denoising_steps=HELD_OUT_STEPS
    )

    def canvas_of(row: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        return step_noise(row, 0, step, config.canvas_length, config.vocab_size)

    rows = [network.new_row() for _ in prompts]
    network.encode([EncodeInput(*pair) for pair in zip(rows, prompts, strict=True)])
    hidden = [network.first_hidden(canvas_of(i, 0)[1]) for i in range(len(rows))]
    given = list(forced)
    for step in range(1, HELD_OUT_STEPS + 1):
        heat = params.temperature_at(step)
        noise = [canvas_of(i, step) for i in range(len(rows))]
        bound = params.entropy_bound
        if given:
            # Nothing is accepted, so the next canvas is the given noise.
            noise = [(u, c) for (u, _), c in zip(noise, given[step - 1], strict=True)]
            bound = NOTHING
        report("comparing", step, HELD_OUT_STEPS)
        outs = network.denoise(
            [
                DenoiseInput(*each, heat, bound, *n)
                for *each, n in zip(rows, hidden, noise, strict=True)
            ]
        )
        hidden = [each.next_hidden for each in outs]
        if not given:
            forced.append([each.canvas for each in outs])
    return found


def _compared(expected: Sequence[Tensor], found: Sequence[Tensor]) -> Json:
    pairs = [*zip(expected, found, strict=True)]
    kl = np.concatenate([divergence(a / HEAT, (b / HEAT).numpy()) for a, b in pairs])
    same = np.mean([(wide.argmax(-1) == each.argmax(-1)).float().mean() for wide, each in pairs])
    return {"mean KL": float(kl.mean()), "same best token": float(same)}
