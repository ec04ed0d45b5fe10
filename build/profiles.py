"""Optimization profiles: the range of sizes for each dynamic dimension of a segment's graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.defaults import OCTET, PREFILL_CHUNK, SOFT_TOKENS, octets
from canvasrt.formats import FORMATS

# The context that kernels are tuned for. Everything up to --max-context works.
TYPICAL_CONTEXT = 2048

ENCODE, DENOISE, DENOISE_BATCH, IMAGES = "encode", "denoise", "denoise_batch", "images"


@dataclass(frozen=True)
class Range:
    """The smallest, usual and largest size of one dimension."""

    min: int
    opt: int
    max: int

    def to_json(self) -> dict[str, int]:
        """Return the range as in the manifest."""
        return {"min": self.min, "opt": self.opt, "max": self.max}


# Dimension name in the graph → its sizes.
Profile = dict[str, Range]


def profiles(
    segment: Mapping[str, Any],
    model: ModelConfig,
    max_context: int,
    max_batch: int,
    prefill_chunk: int = PREFILL_CHUNK,
) -> dict[str, Profile]:
    """Return a segment's profiles by name. `segment` is its manifest entry.

    `encode` takes a prefill chunk or a finished canvas, for any number of requests. `denoise` takes
    one request's canvas, `denoise_batch` several. Kernels are tuned for `opt`; only `max` is
    binding.
    """
    rows = _rows(max_batch)
    if "layers" in segment:
        longest = max(model.canvas_length, min(prefill_chunk, max_context))
        return _body(segment, model, max_context, max_batch, longest)
    if segment["name"] == "head":
        canvas = _always(model.canvas_length)
        return {name: {"batch": batch, "length": canvas} for name, batch in rows.items()}
    assert model.vision is not None, segment["name"]
    square = model.vision["pooling_kernel_size"] ** 2
    # The exporter names the number of patches by its expression.
    patches = Range(square, square * SOFT_TOKENS, square * SOFT_TOKENS)
    return {IMAGES: {"images": Range(1, 1, max_batch), f"{square}*soft_tokens": patches}}


def to_json(made: Mapping[str, Profile]) -> list[dict[str, Any]]:
    """Return profiles as in the manifest, in the engine's order."""
    return [
        {"name": name, **{dimension: size.to_json() for dimension, size in sizes.items()}}
        for name, sizes in made.items()
    ]


def _body(
    segment: Mapping[str, Any],
    model: ModelConfig,
    max_context: int,
    max_batch: int,
    longest: int,
) -> dict[str, Profile]:
    canvas = model.canvas_length
    cached = {
        "full": octets(max_context),
        "sliding": octets(min(model.sliding_window - 1, max_context)),
    }
    past = {
        # The first call of a request has an empty past of one octet.
        f"octets_{kind}": Range(1, min(TYPICAL_CONTEXT // OCTET, cached[kind]), cached[kind])
        for kind in sorted({model.layers[layer].kind for layer in segment["layers"]})
    }
    slots = _capacity(model, longest, 1, max_batch)
    made = {
        ENCODE: {
            "batch": Range(1, 1, max_batch),
            "length": Range(1, longest, longest),
            **_slots(model, slots),
            **past,
        }
    }
    for name, batch in _rows(max_batch).items():
        slots = _capacity(model, canvas, batch.opt, batch.max)
        tokens = canvas if batch.max == 1 and _feeds_all_tokens(segment) else None
        size = {"batch": batch, "length": _always(canvas)}
        made[name] = {**size, **_slots(model, slots, tokens), **past}
    return made


def _slots(model: ModelConfig, slots: Range, tokens: int | None = None) -> Profile:
    """Return the experts' dimensions: `slots` per expert, or for the first product, all `tokens` for every expert."""
    if tokens is None:
        return {"capacity": slots, "gate_rows": slots, "gate_queues": _always(model.num_experts)}
    return {"capacity": slots, "gate_rows": _always(tokens), "gate_queues": _always(1)}


def _feeds_all_tokens(segment: Mapping[str, Any]) -> bool:
    """Return whether a single canvas feeds all its tokens to every expert's first product.

    That pays if a format's arithmetic is fast enough: reading the weights dominates either way, and tokens are
    quantized once, not once per slot. In slower formats, arithmetic would dominate.
    """
    formats = segment.get("quantized") or {}
    return any(
        name.endswith("experts.gate_up") and FORMATS[form].feeds_all_tokens
        for name, form in formats.items()
    )


def _rows(max_batch: int) -> dict[str, Range]:
    """Return how many requests are denoised together: one, and a full batch if there may be more."""
    rows = {DENOISE: _always(1)}
    if max_batch > 1:
        rows[DENOISE_BATCH] = Range(2, max_batch, max_batch)
    return rows


def _capacity(model: ModelConfig, length: int, usual_rows: int, most_rows: int) -> Range:
    """Return the slots per expert for calls of `length` tokens per row."""
    most = max_capacity(model, length, most_rows)
    return Range(1, min(most, _twice_the_mean(model, length * usual_rows)), most)


def max_capacity(model: ModelConfig, longest: int, max_batch: int) -> int:
    """Return the most slots per expert that an engine supports.

    They suffice for any single row, and for the runtime's first guess for a full batch, twice the
    mean load. A batch that overflows them is run row by row. Slots for every token of a batch at
    one expert would take gigabytes and hardly ever be used.
    """
    return max(longest, _twice_the_mean(model, longest * max_batch))


def _twice_the_mean(model: ModelConfig, tokens: int) -> int:
    return min(tokens, -(-2 * tokens * model.top_k_experts // model.num_experts))


def _always(size: int) -> Range:
    return Range(size, size, size)
