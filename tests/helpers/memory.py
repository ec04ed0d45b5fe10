"""The memory estimate with usual options, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from canvasrt.build import memory
from canvasrt.build.memory import Estimate, Weights
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.defaults import LAYERS_PER_SEGMENT, PREFILL_CHUNK
from canvasrt.pass_shapes import plan_passes


def estimate(
    model: ModelConfig,
    precision: str,
    context: int,
    batch: int,
    on_cpu: bool = False,
    formats: Mapping[str, str] | None = None,
    kv_cache: str | None = None,
    layers_per_segment: int = LAYERS_PER_SEGMENT,
    prefill_chunk: int = PREFILL_CHUNK,
    sees: bool = True,
) -> Estimate:
    """Estimate the memory for `batch` requests of `context` tokens each."""
    model = model if sees else replace(model, vision=None)
    weights = Weights(model, precision, formats, layers_per_segment, on_cpu)
    return memory.estimate(weights, plan_passes(model, context, batch, prefill_chunk), kv_cache)
