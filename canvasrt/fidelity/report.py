"""Measures a bundle against its checkpoint, and says whether the limits hold."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from canvasrt import progress
from canvasrt.build.memory import parameters
from canvasrt.bundle import Bundle, made_by
from canvasrt.checkpoints.description import Description
from canvasrt.errors import CanvasError
from canvasrt.fidelity.answers import ask_questions, compare_pace
from canvasrt.fidelity.compare import COMPARED_STEPS, PHASES, Steps, compare_steps
from canvasrt.fidelity.limits import check_limits, limits_of
from canvasrt.fidelity.observed_model import ObservedModel
from canvasrt.fidelity.part_errors import DENOISE, part_errors
from canvasrt.fidelity.prompts import is_demo, prompts_for
from canvasrt.fidelity.reference import ReferenceModel
from canvasrt.fidelity.weights import weight_errors
from canvasrt.machine import available_bytes, gpus
from canvasrt.recipes import SHIPPED
from canvasrt.runtime.tokenizer import Tokenizer
from canvasrt.types import Json

WORST = 5
# Number of prompts for a streamed model: few, because each pass reads the model from disk.
STREAMED_PROMPTS = 2


def measure_quality(
    bundle: Bundle,
    checkpoint: Description,
    questions: int,
) -> Json:
    """Return the report as JSON.

    If the checkpoint answers the demo's questions, `questions` questions are asked per task; 0 skips complete
    generations. A model that does not fit in memory is streamed, one segment or layer at a time, with few prompts, few
    steps, and no complete generations. Raises CanvasError if the bundle cannot run here, or if the checkpoint has a
    different shape.
    """
    config = checkpoint.model
    if config != bundle.manifest.model:
        raise CanvasError(
            f"{checkpoint.folder} and {bundle.path} have different shapes",
            "give the checkpoint that the bundle was made from",
        )
    _check_runs_here(bundle)
    progress.report("loading both sides")
    streamed = is_streamed(checkpoint)
    observed, reference = ObservedModel(bundle, streamed), ReferenceModel(checkpoint, streamed)
    tokenizer = Tokenizer.load(bundle) if bundle.manifest.tokenizer else None
    room = observed.model.max_context - config.canvas_length
    prompts = prompts_for(checkpoint.folder, tokenizer, config, room)

    if streamed:
        prompts = replace(prompts, tokens=prompts.tokens[:STREAMED_PROMPTS])
    most = len(PHASES) if streamed else COMPARED_STEPS
    steps = compare_steps(observed, reference, prompts, most)
    report: Json = {**_header(bundle), "steps": steps.to_json(), "pace": None, "answers": None}
    if questions and not streamed:
        sides = observed.model, reference
        if tokenizer is not None and is_demo(checkpoint.folder):
            report["answers"], report["pace"] = ask_questions(*sides, tokenizer, questions)
        else:
            report["pace"] = compare_pace(*sides, prompts)
    report |= _inside(observed, checkpoint.folder, steps)
    report["limits"] = check_limits(limits_of(bundle.manifest.options), report)
    report["ok"] = all(each["ok"] for each in report["limits"])
    return report


def is_streamed(checkpoint: Description) -> bool:
    """Return whether bundle and reference are streamed: if the model in fp32 needs over a third of this machine's
    available memory, or if the checkpoint is quantized.
    """
    whole = 4 * sum(parameters(checkpoint.model).values())
    return whole > available_bytes() // 3 or checkpoint.quantization is not None


def _check_runs_here(bundle: Bundle) -> None:
    """Raise CanvasError, before anything is loaded, if the bundle needs a GPU and this machine has no GPU."""
    target = bundle.manifest.target or {}
    if target.get("backend", "onnxruntime") == "onnxruntime" or gpus():
        return
    options = bundle.manifest.options
    name, asked = (options.get("recipe") or {}).get("name"), ""
    # For a quantized checkpoint, its own precision is the default.
    if name and "checkpoint_quantization" not in options:
        asked = f" --precision {name if name in SHIPPED else 'RECIPE.yaml'}"
    raise CanvasError(
        f"{bundle.path} was built for {target['name']}, and this machine has no GPU to run it",
        f"verify the bundle that `canvasrt build … --target cpu{asked}` makes from the same graphs: it has the same"
        " weights and scales",
    )


def finite(value: Any) -> Any:
    """Replace NaN and infinity by null, because JSON has neither. Verdicts do not change."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def failures(report: Json) -> str:
    """Return a text that lists the limits that a report exceeds."""
    return "; ".join(
        f"{each['what']}{' (' + each['where'] + ')' if each['where'] else ''}: {each['measured']:.4g},"
        f" {'at least' if each['at_least'] else 'at most'} {each['limit']:g}"
        for each in report["limits"]
        if not each["ok"]
    )


def _header(bundle: Bundle) -> Json:
    options = bundle.manifest.options
    recipe = options.get("recipe") or {}
    return {
        "ok": False,
        "bundle": bundle.manifest.digest,
        "target": (bundle.manifest.target or {}).get("name"),
        "precision": options.get("precision"),
        "recipe": recipe.get("name"),
        "recipe_description": recipe.get("description"),
        "versions": made_by(("onnxruntime", "torch", "transformers")),
        "limits": [],
    }


def _inside(observed: ObservedModel, checkpoint: Path, steps: Steps) -> Json:
    """Return the errors of segments, layers, matrices and experts. The errors are None for engines, whose internal
    values cannot be read."""
    if observed.backend is None:
        return dict.fromkeys(("segments", "head", "layers", "weights", "experts", "worst"))
    segments, layers = part_errors(observed, steps.passes)
    weights, experts = weight_errors(observed.bundle, checkpoint, steps.passes)
    found: Json = {
        "segments": segments,
        "head": {name: each.value for name, each in steps.head.items()},
        "layers": layers,
        "weights": weights,
        "experts": experts,
    }
    return {**found, "worst": _worst(found)}


def _worst(found: Json) -> Json:
    """Return the entries that have the largest errors, worst first. Entries without an error are left out."""

    def first(items: list[Json], key: Any) -> list[Json]:
        return sorted((each for each in items if key(each)), key=key, reverse=True)[:WORST]

    return {
        "layers": first(found["layers"], lambda each: each[DENOISE]),
        "experts": first(found["experts"], _expert_error),
        "weights": first(found["weights"], lambda each: each["error"]),
    }


def _expert_error(expert: Json) -> float:
    """Return the error of an expert's output, or of its matrices if no token reached it."""
    return expert["output"] or max(expert["gate_up"], expert["down"])
