"""Calibration: the model generates from real prompts, and observers keep the largest activations
they see.

Prefill, commits and denoising at every noise level run as in use, with self-conditioning: the
runtime's own generator runs the exported graphs. Prompts are read on demand, so a file may have any
length.
"""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from canvasrt.bundle import MANIFEST, Bundle, load_bundle, write_manifest
from canvasrt.checkpoints.weight_names import local_names
from canvasrt.defaults import MAX_CONTEXT
from canvasrt.errors import CanvasError
from canvasrt.export.quantize.calibration_prompts import CalibrationPrompts, default_prompts
from canvasrt.export.quantize.observers import AMAX, ROUTED, observe
from canvasrt.formats import FORMATS
from canvasrt.progress import Progress, no_progress
from canvasrt.recipes.recipe import Recipe
from canvasrt.runtime.engine import Arrays, Backend, Segment
from canvasrt.runtime.generator import Draft, Finished, Generator
from canvasrt.runtime.open import open_model
from canvasrt.runtime.tokenizer import Tokenizer

# Requests in memory at once, each with its cache.
CONCURRENT = 8
_PREFIX = "observed."


@dataclass
class Calibration:
    """What was observed.

    Attributes:
        amax: the largest magnitude of each weight's input, by the weight's global name. The experts
            of a layer share one.
        cache: the same for cached values, by `layers.<i>.key` and `layers.<i>.value`; empty without
            an FP8 cache.
        routed: per layer, the tokens given to each expert.
        steps: denoising passes at each step of the schedule, from the first, noisiest one on.
        prompts: how many there were; sha256: of their file.
    """

    amax: dict[str, float] = field(default_factory=dict)
    cache: dict[str, float] = field(default_factory=dict)
    routed: dict[int, list[int]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    prompts: int = 0
    sha256: str = ""

    @property
    def idle_experts(self) -> dict[int, list[int]]:
        """The experts that got no token, by layer."""
        idle = {
            layer: [expert for expert, count in enumerate(counts) if not count]
            for layer, counts in self.routed.items()
        }
        return {layer: experts for layer, experts in idle.items() if experts}

    def to_json(self) -> dict[str, Any]:
        """Return what a quantized bundle's `calibration.json` holds."""
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
    graphs: Bundle,
    recipe: Recipe,
    prompts: Path | None = None,
    progress: Progress | None = None,
    folder: Path | None = None,
) -> Calibration:
    """Generate from `prompts` with plain graphs and observe the inputs of the recipe's weights.

    Args:
        graphs: fp32 or bf16; bf16 graphs run in fp32.
        prompts: a JSONL file; by default the one that comes with canvasrt.
        folder: an empty one for the observed graphs; by default next to the graphs.

    Raises `CanvasError` for a recipe that does not fit the model, for unusable prompts, by file and
    line, and for activations that are not finite.
    """
    manifest = graphs.manifest
    report = progress or no_progress
    formats = recipe.formats(manifest.model)
    names = [name for name in formats if FORMATS[formats[name].format].rounds_inputs]
    source = CalibrationPrompts(
        file=prompts or default_prompts(graphs),
        tokenizer=Tokenizer.load(graphs) if manifest.tokenizer else None,
        config=manifest.model,
        sampler=manifest.sampler,
        settings=recipe.calibration,
        max_context=min(manifest.model.max_position_embeddings, MAX_CONTEXT),
    )
    count = source.check()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix=".calibration-", dir=graphs.path.parent) as made:
            return _run(graphs, names, recipe, source, count, report, Path(made))
    return _run(graphs, names, recipe, source, count, report, folder)


def _run(
    graphs: Bundle,
    names: Sequence[str],
    recipe: Recipe,
    prompts: CalibrationPrompts,
    count: int,
    report: Progress,
    folder: Path,
) -> Calibration:
    from canvasrt.runtime.backends.onnxruntime import OrtBackend
    from canvasrt.runtime.tables import pass_work

    wide = _wide(graphs, folder, report)
    found = Calibration(prompts=count, sha256=prompts.sha256())
    watched = _watched(graphs, names, recipe.kv_cache is not None)
    backend = _Observing(OrtBackend(work=pass_work(graphs.manifest.model)), watched, found)
    model = open_model(wide.path, check=False, backend=backend)
    _generate(Generator(model, CONCURRENT), prompts, count, found, report)
    broken = [name for name, value in found.amax.items() if not math.isfinite(value)]
    if broken:
        raise CanvasError(
            f"the inputs of {', '.join(broken[:3])} overflowed during calibration",
            "the checkpoint is damaged, or a prompt contains tokens that it was not trained on",
        )
    found.amax = {name: found.amax[name] for name in names}
    return found


def _generate(
    generator: Generator,
    prompts: Iterable[Any],
    count: int,
    found: Calibration,
    report: Progress,
) -> None:
    """Run all prompts, a few at a time."""
    waiting = iter(prompts)
    active = done = 0
    while True:
        while active < generator.max_batch and (request := next(waiting, None)) is not None:
            generator.add(request)
            active += 1
        if not active:
            return
        report("calibrating", done, count)
        for event in generator.step():
            if isinstance(event, Draft):
                found.steps += [0] * (event.step - len(found.steps))
                found.steps[event.step - 1] += 1
            elif isinstance(event, Finished):
                active, done = active - 1, done + 1
                report("calibrating", done, count)


@dataclass(frozen=True)
class _Watched:
    """What a segment's observers need: initializers by global name, cache outputs by name, and the layers."""

    weights: dict[str, str]
    cached: dict[str, str]
    layers: tuple[int, ...]
    experts: int


def _watched(graphs: Bundle, names: Sequence[str], cache: bool) -> dict[str, _Watched]:
    """Return what to observe, by segment."""
    watched = {}
    for entry in graphs.manifest.segments:
        layers = tuple(entry.get("layers", ()))
        cached = {
            f"layers.{layer}.{part}": f"new_{part}_{layer}"
            for layer in layers
            for part in ("key", "value")
        }
        watched[entry["name"]] = _Watched(
            local_names(entry, names),
            cached if cache else {},
            layers,
            graphs.manifest.model.num_experts,
        )
    return watched


class _Observing:
    """A backend whose segments observe as they run."""

    def __init__(self, inner: Backend, watched: Mapping[str, _Watched], found: Calibration) -> None:
        self.rows_apart, self.max_workers = inner.rows_apart, inner.max_workers
        self._inner, self._watched, self._found = inner, watched, found
        self._lock = threading.Lock()

    def open(self, name: str, file: Path) -> Segment:
        watched = self._watched[name]
        if not watched.layers and not watched.weights:
            return self._inner.open(name, file)
        model = ir.load(file)
        observe(
            model, list(watched.weights.values()), list(watched.cached.values()), watched.experts
        )
        # Next to the original, whose weights it reads.
        observed = file.with_name(_PREFIX + file.name)
        ir.save(model, observed)
        segment = self._inner.open(name, observed)
        return _ObservedSegment(segment, watched, self._found, self._lock)


class _ObservedSegment:
    """A segment that records what its observers saw."""

    def __init__(
        self, inner: Segment, watched: _Watched, found: Calibration, lock: threading.Lock
    ) -> None:
        self.name, self.inputs = inner.name, inner.inputs
        self._own = tuple(name for name in inner.outputs if name in (AMAX, ROUTED))
        self.outputs = tuple(name for name in inner.outputs if name not in self._own)
        self._inner, self._watched = inner, watched
        self._found, self._lock = found, lock

    def run(self, feeds: Mapping[str, np.ndarray], wanted: Iterable[str] | None = None) -> Arrays:
        names = list(self.outputs if wanted is None else wanted)
        out = self._inner.run(feeds, [*names, *self._own])
        # A call with too few slots is repeated, and its results are wrong.
        if "load" not in out or out["load"].max() <= len(feeds["slots"]):
            with self._lock:
                self._note(out)
        return {name: out[name] for name in names}

    def _note(self, out: Arrays) -> None:
        found, watched = self._found, self._watched
        if AMAX in out:
            weights = len(watched.weights)
            _raise_to(found.amax, watched.weights, out[AMAX][:weights])
            _raise_to(found.cache, watched.cached, out[AMAX][weights:])
        if ROUTED in out:
            for layer, counts in zip(watched.layers, out[ROUTED], strict=True):
                before = found.routed.get(layer, [0] * watched.experts)
                found.routed[layer] = (counts + before).tolist()


def _raise_to(found: dict[str, float], names: Iterable[str], values: np.ndarray) -> None:
    for name, value in zip(names, values.tolist(), strict=True):
        # Unlike max(), it keeps a NaN in any position.
        found[name] = float(np.maximum(value, found.get(name, 0.0)))


def _wide(graphs: Bundle, folder: Path, report: Progress) -> Bundle:
    """Return the graphs in fp32 in `folder`, where files can be added."""
    from canvasrt.staging import link_or_copy

    manifest = graphs.manifest
    if manifest.options.get("precision", "fp32") == "fp32":
        for name in (*manifest.files, MANIFEST):
            link_or_copy(graphs.path / name, folder / name)
        return load_bundle(folder, kind="graphs", check=False)
    from canvasrt.graphs.lower import lower

    embedding = lower(
        graphs, folder, lambda what, done, total: report("preparing calibration", done, total)
    )
    write_manifest(
        folder,
        kind="graphs",
        made_from=manifest.made_from,
        options=manifest.options,
        model=manifest.model,
        sampler=manifest.sampler,
        segments=manifest.segments,
        embedding=embedding,
        tokenizer=None,
        # These files are deleted soon, so nobody reads their hashes.
        known={
            file.name: {"sha256": "", "bytes": file.stat().st_size} for file in folder.iterdir()
        },
    )
    return load_bundle(folder, kind="graphs", check=False)
