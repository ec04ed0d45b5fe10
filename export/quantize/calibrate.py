"""Calibration: the model generates from real prompts while the largest activations are recorded.

The runtime's generator runs prefill, the encoding of finished canvases, and denoising at every noise level as in
serving, including self-conditioning. One layer is in memory at a time, so memory depends neither on the model's depth
nor on the number of prompts.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvasrt.calibration_prompts import (
    CALIBRATED,
    CalibrationPrompts,
    Workload,
    most_passes,
)
from canvasrt.formats import FORMATS
from canvasrt.progress import report
from canvasrt.recipes.recipe import Recipe
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.request import Draft, Finished, Request
from canvasrt.staging import sync

if TYPE_CHECKING:
    from canvasrt.export.quantize.stored_weights import WeightSource


@dataclass
class Calibration:
    """The result of a calibration: activations' largest magnitudes, and statistics of routing.

    Attributes:
        amax: global name of a weight → the largest magnitude of its input. The experts of a layer share one value.
        cache: `layers.<i>.key` or `layers.<i>.value` → the largest magnitude of a cached number; empty if the cache is
        not FP8.
        routed: layer → how many tokens each expert got.
        steps: the number of denoising passes at each step of the schedule, noisiest step first.
        prompts: the number of prompts.
        sha256: the SHA-256 of the prompts' file.
    """

    amax: dict[str, float] = field(default_factory=dict)
    cache: dict[str, float] = field(default_factory=dict)
    routed: dict[int, list[int]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    prompts: int = 0
    sha256: str = ""

    @property
    def idle_experts(self) -> dict[int, list[int]]:
        """Each layer's experts that got no token."""
        idle = {
            layer: [expert for expert, count in enumerate(counts) if not count]
            for layer, counts in self.routed.items()
        }
        return {layer: experts for layer, experts in idle.items() if experts}

    @classmethod
    def read(cls, file: Path) -> Calibration:
        """Read the result that an earlier `calibrate` wrote to `file`."""
        data = json.loads(file.read_text(encoding="utf-8"))
        data["routed"] = {int(layer): counts for layer, counts in data["routed"].items()}
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        """Return the content of a quantized bundle's `calibration.json`."""
        return {
            "prompts": self.prompts,
            "prompts_sha256": self.sha256,
            "denoising_passes": self.steps,
            "amax": self.amax,
            "cache_amax": self.cache,
            "routed": {f"layers.{layer}": counts for layer, counts in self.routed.items()},
            "idle_experts": {f"layers.{layer}": idle for layer, idle in self.idle_experts.items()},
        }


def calibrate(
    weights: WeightSource, recipe: Recipe, prompts: CalibrationPrompts, room: Path
) -> Calibration:
    """Generate from `prompts` and record the largest inputs of the weights that the recipe quantizes. Products are
    computed in fp32.

    room: the folder for the result, and for the progress of an interrupted calibration.

    Raises `CanvasError` for a recipe that does not fit the model; for unusable prompts, naming file and line; for
    weights and activations that are not finite, naming them; and if GPU memory runs out.
    """
    from canvasrt.export.quantize.network import gpu_memory

    finished = room / CALIBRATED
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return Calibration.read(finished)  # unless the file is missing or cut off
    with gpu_memory():
        found = _observe(weights, recipe, prompts, room)
    whole = finished.with_suffix(".new")
    whole.write_text(json.dumps(asdict(found)), encoding="utf-8")
    sync(whole)
    whole.replace(finished)
    # The sweeps' files are removed to make room for graphs.
    shutil.rmtree(room / "sweeps")
    return found


def _observe(
    weights: WeightSource, recipe: Recipe, prompts: CalibrationPrompts, room: Path
) -> Calibration:
    from canvasrt.export.quantize.network import StreamedNetwork, device_here
    from canvasrt.export.quantize.saved_sweeps import SavedSweeps

    config = weights.config
    formats = recipe.formats(config)
    names = [name for name in formats if FORMATS[formats[name].format].rounds_inputs]
    work = prompts.work
    # The generator accepts this network in place of a `Model`, because no request has images.
    saved = SavedSweeps(room / "sweeps", device_here())
    network: Any = StreamedNetwork(weights, work.together, saved)
    steps = _generate(network, prompts, work)
    observed = network.observed
    amax = {name: float(observed.amax[name]) for name in names}
    cached = {
        f"layers.{layer}.{part}": float(observed.amax[f"layers.{layer}.{part}"])
        for layer in range(len(config.layers))
        for part in ("key", "value")
    }
    routed = {layer: counts.tolist() for layer, counts in observed.routed.items()}
    return Calibration(
        amax, cached if recipe.kv_cache else {}, routed, steps, work.prompts, prompts.sha256
    )


def _generate(network: Any, prompts: Iterable[Request], work: Workload) -> list[int]:
    """Run all prompts, `work.together` at a time. Return how many passes each step of the schedule had."""
    generator = Generator(network, work.together)
    steps: list[int] = []
    waiting = iter(prompts)
    left: dict[int, int] = {}  # running request → how many more passes it has at most
    done = 0
    while True:
        while len(left) < generator.max_batch and (request := next(waiting, None)) is not None:
            left[generator.add(request)] = most_passes(request, generator.model.config)
        if not left:
            return steps
        # Sweeps saved before an interruption are not reported: they take no time, so the estimate would be too short.
        if not network.is_repeating:
            report("calibrating", done, work.passes)
        for event in generator.step():
            if isinstance(event, Draft):
                steps += [0] * (event.step - len(steps))
                steps[event.step - 1] += 1
                left[event.id] -= 1
                done += 1
            elif isinstance(event, Finished):
                done += left.pop(event.id)
        if not left:
            report("calibrating", done, work.passes)
