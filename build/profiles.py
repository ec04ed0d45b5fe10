"""Optimization profiles: the sizes that each dynamic dimension of a segment's graph may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from canvasrt.model import ModelConfig

# The most tokens of a prompt that the runtime encodes in one call.
PREFILL_CHUNK = 512
# The context that kernels are chosen for; everything up to --max-context works.
TYPICAL_CONTEXT = 2048
# Soft tokens of an image, and the images of a call: the defaults of transformers' image processor.
SOFT_TOKENS = 280


@dataclass(frozen=True)
class Range:
    """The least, the usual and the largest size of one dimension."""

    min: int
    opt: int
    max: int

    def to_json(self) -> dict[str, int]:
        """As the manifest has it."""
        return {"min": self.min, "opt": self.opt, "max": self.max}


# Dimension name of the graph → its sizes.
Profile = dict[str, Range]


def profile(
    segment: Mapping[str, Any], model: ModelConfig, max_context: int, max_batch: int
) -> Profile:
    """The one wide profile of a segment, described by its manifest entry.

    A profile a phase or a batch size would cost every engine megabytes, and TensorRT-RTX compiles its kernels
    for the shapes that it meets anyway. `opt` is a denoising step of a full batch at a usual context.
    """
    if "layers" in segment:
        return _body(segment, model, max_context, max_batch)
    if segment["name"] == "head":
        return {"batch": Range(1, max_batch, max_batch), "length": _always(model.canvas_length)}
    assert model.vision is not None, segment["name"]
    square = model.vision["pooling_kernel_size"] ** 2
    # The exporter names the number of patches by the expression that it is.
    return {
        "images": Range(1, 1, max_batch),
        f"{square}*soft_tokens": Range(square, square * SOFT_TOKENS, square * SOFT_TOKENS),
    }


def _body(
    segment: Mapping[str, Any], model: ModelConfig, max_context: int, max_batch: int
) -> Profile:
    canvas = model.canvas_length
    longest = max(canvas, min(PREFILL_CHUNK, max_context))
    capacity = max_capacity(model, longest, max_batch)
    ranges = {
        "batch": Range(1, max_batch, max_batch),
        "length": Range(1, canvas, longest),
        "capacity": Range(1, min(capacity, _twice_the_mean(model, canvas * max_batch)), capacity),
    }
    cached = {"full": max_context, "sliding": min(model.sliding_window - 1, max_context)}
    for kind in sorted({model.layers[layer].kind for layer in segment["layers"]}):
        # 0: the first call of a request has no past.
        ranges[f"past_{kind}"] = Range(0, min(TYPICAL_CONTEXT, cached[kind]), cached[kind])
    return ranges


def max_capacity(model: ModelConfig, longest: int, max_batch: int) -> int:
    """The most slots an expert that an engine has room for.

    Enough that a call of one row cannot overflow, and that the first guess of the runtime for a full batch, twice
    the mean load, is allowed. A batch that overflows even this is run row by row: room for every token of a
    batch at one expert would take gigabytes, and hardly ever be used.
    """
    return max(longest, _twice_the_mean(model, longest * max_batch))


def _twice_the_mean(model: ModelConfig, tokens: int) -> int:
    return min(tokens, -(-2 * tokens * model.top_k_experts // model.num_experts))


def _always(size: int) -> Range:
    return Range(size, size, size)
