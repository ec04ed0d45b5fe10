"""Predicts the memory, disk and time of a calibration on this machine."""

from __future__ import annotations

import os
import time
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvasrt.build.source import Source
from canvasrt.calibration_prompts import CalibrationPrompts, Workload
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.locate import fingerprint
from canvasrt.checkpoints.weight_names import DOWN, GATE_UP, head_matrices, layer_matrices
from canvasrt.extras import require
from canvasrt.machine import available_bytes
from canvasrt.recipes.recipe import Recipe

# Bytes of memory that Python, torch, the tokenizer and a piece of a weight take.
_BASE = 600 * 10**6
# How many tokens run through a layer together (export/quantize/network.py). The head has `_HEAD_TENSORS` float32
# tensors of size canvas × vocabulary in memory at the same time.
_TOGETHER, _HEAD_TENSORS = 4096, 5
# A sweep's products are smaller than the measured one, and reach this fraction of its speed.
_EFFICIENCY = 0.75
_SMALL = 10**8


@dataclass(frozen=True)
class CalibrationNeeds:
    """What a calibration needs. `memory` and `disk` are bytes. `flops`, `read` (bytes of weights) and `widened` (bytes
    of weights after conversion to float32) are sums over all sweeps. A sweep is one run through all weights."""

    work: Workload
    memory: int
    disk: int
    flops: int
    read: int
    widened: int
    source: Path

    def seconds(self) -> int:
        """Return how many seconds the calibration takes on this machine if no request stops early."""
        done = self.flops / (_EFFICIENCY * _flops_per_second())
        widening = 0.0 if _device() == "cuda" else self.widened / _widened_per_second()
        # Later sweeps read from the disk only what did not fit into the page cache.
        once = self.read / self.work.sweeps
        again = min(once, max(0, once + self.memory - available_bytes()))
        read = once + (self.work.sweeps - 1) * again
        disk, page_cache = _bytes_per_second(self.source)
        return round(done + read / disk + (self.read - read) / page_cache + widening)

    def to_json(self) -> dict[str, Any]:
        """Return the data for `--dry-run`."""
        return {
            "prompts": self.work.prompts,
            "passes": self.work.passes,
            "sweeps": self.work.sweeps,
            "memory": self.memory,
            "disk": self.disk,
            "seconds": self.seconds(),
        }


def prompts_of(source: Source, recipe: Recipe, file: Path | None) -> CalibrationPrompts | None:
    """Return the prompts of a build's calibration; None if the source is only a model's description, without files."""
    if source.graphs is not None:
        manifest = source.graphs.manifest
        tokenizer = {Path(name).name: source.graphs.file(name) for name in manifest.tokenizer or ()}
        made_from: Mapping[str, Any] = manifest.made_from
        return CalibrationPrompts.of(
            file, recipe, source.model, manifest.sampler, made_from, tokenizer
        )
    if source.checkpoint is None:
        return None
    # Hashes are only needed to recognize the bundled checkpoints, which are small and have their own prompts.
    size = sum(each.stat().st_size for each in source.checkpoint.folder.glob("*.safetensors"))
    made_from = {"files": fingerprint(source.checkpoint.folder)} if size < _SMALL else {}
    return CalibrationPrompts.of(
        file,
        recipe,
        source.model,
        source.checkpoint.sampler,
        made_from,
        source.checkpoint.tokenizer,
    )


def calibration_needs(prompts: CalibrationPrompts, path: Path, width: int = 2) -> CalibrationNeeds:
    """Return what a calibration needs if weights are stored with `width` bytes per number. Raises CanvasError for
    unusable prompts."""
    work, model = prompts.work, prompts.config
    layers = [_layer(model, index, width) for index in range(len(model.layers))]
    head = _Part.of({name: each.size for name, each in head_matrices(model).items()}, 1, width)
    canvas, hidden = model.canvas_length, model.hidden_size
    logits = canvas * model.vocab_size
    wide = (
        3 * model.intermediate_size
        + 4 * hidden
        + 2 * model.num_attention_heads * max(each.head_dim for each in model.layers)
    )
    room = max(each.memory for each in (*layers, head))
    activations = 4 * max(_HEAD_TENSORS * logits, _TOGETHER * wide)
    states = 8 * work.together * canvas * hidden
    each_pass = (
        2 * canvas * (sum(each.active for each in layers) + head.active) + 2 * logits * hidden
    )
    clean = 2 * work.tokens * sum(each.active for each in layers)
    # Two products per layer: queries times keys, and scores times values.
    attention = 4 * sum(work.attended[each.kind] * each.head_dim for each in model.layers)
    every = [*layers, head]
    # In a sweep, experts are converted to float32 once per group of tokens, and all other weights are converted once.
    groups = -(-work.together * canvas // _TOGETHER)
    return CalibrationNeeds(
        work,
        _BASE + room + activations + work.cached + states,
        2 * work.cached + states,
        work.passes * each_pass + clean + attention * model.num_attention_heads,
        work.sweeps * sum(each.stored for each in every),
        4 * work.sweeps * sum(each.numbers + (groups - 1) * each.experts for each in every),
        path,
    )


@dataclass(frozen=True)
class _Part:
    """A layer or the head. `memory` is its size in memory, and `stored` its size in the file, both in bytes. `numbers`
    counts all weights, `experts` the experts' weights, and `active` the weights that one token uses."""

    memory: int
    stored: int
    numbers: int
    experts: int
    active: int

    @classmethod
    def of(cls, sizes: Mapping[str, int], share: float, width: int) -> _Part:
        """share: the fraction of the experts to which one token is routed."""
        numbers = sum(sizes.values())
        experts = sum(size for name, size in sizes.items() if name in (GATE_UP, DOWN))
        active = numbers - round(experts * (1 - share))
        memory = experts * width + (numbers - experts) * 4
        return cls(memory, numbers * width, numbers, experts, active)


def _layer(model: ModelConfig, index: int, width: int) -> _Part:
    sizes = {name: each.size for name, each in layer_matrices(model, index).items()}
    return _Part.of(sizes, model.top_k_experts / model.num_experts, width)


def _device() -> str:
    return "cuda" if require("torch", "export").cuda.is_available() else "cpu"


def _flops_per_second() -> float:
    """Measure the speed of a large float32 product on the device that a calibration would use."""
    torch, device = require("torch", "export"), _device()
    rows, size = (8192, 8192) if device == "cuda" else (1024, 2048)
    one, other = torch.ones(rows, size, device=device), torch.ones(size, size, device=device)
    return 2 * rows * size**2 / _fastest(lambda: (one @ other).sum().item())


def _widened_per_second() -> float:
    """Measure how many bytes per second this CPU writes when it converts weights to float32."""
    torch = require("torch", "export")
    weights = torch.ones(1 << 22, dtype=torch.bfloat16)
    return 4 * len(weights) / _fastest(weights.float)


def _fastest(run: Callable[[], object]) -> float:
    """Return how many seconds the fastest of four runs takes."""
    return min(timeit.repeat(run, number=1, repeat=4))


def _bytes_per_second(folder: Path) -> list[float]:
    """Measure the bytes per second at which weights reach the calibration's device: first from the disk, then from the
    page cache. Reads several places of the largest file in a folder."""
    torch, device, rates = require("torch", "export"), _device(), []
    file = max(
        (each for each in folder.iterdir() if each.is_file()), key=lambda each: each.stat().st_size
    )
    size = file.stat().st_size
    with file.open("rb", buffering=0) as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for _ in range(2):
            start, read = time.perf_counter(), 1
            for place in range(8):
                handle.seek(size * place // 8)
                piece = torch.empty(1 << 25, dtype=torch.uint8)
                read += handle.readinto(piece.numpy().data)
                piece.to(device)
            rates.append(read / (time.perf_counter() - start))
    return rates
