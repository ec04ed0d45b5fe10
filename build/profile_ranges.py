"""Optimization profiles: the ranges of a segment's dynamic dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.weight_names import GATE_UP
from canvasrt.defaults import OCTET, SOFT_TOKENS, octets
from canvasrt.formats import FORMATS
from canvasrt.pass_shapes import DENOISE, ENCODE, PassPlan, Range, canvas_sizes

# Kernels are tuned for this context length. All lengths up to --max-context work.
TYPICAL_CONTEXT = 2048

DENOISE_BATCH, IMAGES_PROFILE = "denoise_batch", "images"
DENOISE_SMALL = "denoise_small"


# The range of each dynamic dimension's size, by the dimension's name in the graph.
Profile = dict[str, Range]


def profiles(
    segment: Mapping[str, Any], model: ModelConfig, passes: PassPlan
) -> dict[str, Profile]:
    """Return a segment's profiles by name. `segment` is its manifest entry.

    `encode` is for a prefill chunk or a finished canvas of one request; `denoise` for one request's canvas;
    `denoise_batch` for a full batch of canvases, including padding. Canvases below the full length use the
    bodies' profile `encode` and the head's `denoise_small`. Kernels are tuned for a range's `opt`; `max` is the limit.
    """
    if "layers" in segment:
        return _body(segment, model, passes)
    if segment["name"] == "head":
        canvas = _always(passes.canvas)
        made = {name: {"batch": batch, "length": canvas} for name, batch in _rows(passes).items()}
        *small, _ = canvas_sizes(passes.canvas)
        if small:
            size = Range(small[0], small[len(small) // 2], small[-1])
            made[DENOISE_SMALL] = {"batch": _always(1), "length": size}
        return made
    assert model.vision is not None, segment["name"]
    square = model.vision["pooling_kernel_size"] ** 2
    # The runtime processes one image at a time. The exporter's name of the patch dimension is an expression.
    patches = Range(square, square * SOFT_TOKENS, square * SOFT_TOKENS)
    return {IMAGES_PROFILE: {"images": _always(1), f"{square}*soft_tokens": patches}}


def to_json(made: Mapping[str, Profile]) -> list[dict[str, Any]]:
    """Return profiles as the manifest lists them, in the engine's order."""
    return [
        {"name": name, **{dimension: size.to_json() for dimension, size in sizes.items()}}
        for name, sizes in made.items()
    ]


def _body(segment: Mapping[str, Any], model: ModelConfig, passes: PassPlan) -> dict[str, Profile]:
    cached = {"full": octets(passes.widths[-1]), "sliding": octets(passes.window)}
    past = {
        # In a request's first pass, the past is one empty octet (group of eight tokens).
        f"octets_{kind}": Range(1, min(TYPICAL_CONTEXT // OCTET, cached[kind]), cached[kind])
        for kind in sorted({model.layers[layer].kind for layer in segment["layers"]})
    }
    longest = passes.lengths[-1]
    usual = passes.encode_rows[-1]
    made = {
        ENCODE: {
            "batch": _always(1),
            "length": Range(1, longest, longest),
            **_slots(model, Range(1, usual, max(usual, passes.roomy))),
            **past,
        }
    }
    for name, batch in _rows(passes).items():
        size = {"batch": batch, "length": _always(passes.canvas)}
        if batch.max > 1:
            rows = Range(1, passes.batch_rows, passes.batch_rows)
            made[name] = {**size, **_slots(model, rows), **past}
            continue
        tokens = passes.canvas if _feeds_all_tokens(segment) else None
        # In the worst case, a canvas routes all tokens to the same experts.
        rows = Range(1, passes.canvas_rows[0], passes.canvas_rows[-1])
        made[name] = {**size, **_slots(model, rows, tokens), **past}
    return made


def _slots(model: ModelConfig, slots: Range, tokens: int | None = None) -> Profile:
    """Return the ranges of the experts' dimensions. `slots` is the range of slots per expert. If `tokens` is set, the
    first product has that many slots instead: one for every token."""
    if tokens is None:
        return {"capacity": slots, "gate_rows": slots, "gate_queues": _always(model.num_experts)}
    return {"capacity": slots, "gate_rows": _always(tokens), "gate_queues": _always(1)}


def _feeds_all_tokens(segment: Mapping[str, Any]) -> bool:
    """Return whether a single canvas feeds all its tokens to every expert's first product.

    Feeding all tokens is faster if the format's arithmetic is fast: reading the weights then takes most of the time
    either way, and each token is quantized once instead of once per slot.
    """
    formats = segment.get("quantized") or {}
    return any(
        name.endswith(GATE_UP) and FORMATS[form].feeds_all_tokens for name, form in formats.items()
    )


def _rows(passes: PassPlan) -> dict[str, Range]:
    """Return how many requests a denoising pass has in each profile: one or, in the second profile, a full batch."""
    rows = {DENOISE: _always(1)}
    if passes.batch > 1:
        rows[DENOISE_BATCH] = _always(passes.batch)
    return rows


def _always(size: int) -> Range:
    return Range(size, size, size)
