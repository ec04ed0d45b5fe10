"""Assigns kernels to layers and parts of the network by the names of their graph nodes.

The export names a node after its module, for example `layers.2.attention/node_mul_141`. It names a quantized product
after its weight, for example `layers.2.experts.gate_up/product`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from canvasrt.roofline.cost import is_product, step_names, weight
from canvasrt.roofline.fused_attention import is_attention
from canvasrt.roofline.parse import Kernel

ATTENTION, ROUTING, EXPERTS, MLP = "attention", "routing", "experts", "shared MLP"
NORMS, MASKS = "norms", "masks and positions"
HEAD, SAMPLER, SIGNAL = "head", "sampler", "self-conditioning"
VISION, OTHER = "vision", "other"
PARTS = (ATTENTION, ROUTING, EXPERTS, MLP, NORMS, MASKS, HEAD, SAMPLER, SIGNAL, VISION, OTHER)

_LAYER = re.compile(r"^layers\.(\d+)(?:\.([\w.]+))?/")
# Nodes that prepare a layer's cached keys and values.
_PAST = re.compile(r"^layer_(\d+)/")
_INTEGERS = {"Int32", "Int64", "Bool"}


@dataclass(frozen=True)
class Place:
    """Where a kernel belongs: `layer` is a layer's index in the model, or None outside the layers."""

    layer: int | None
    part: str


def place_of(kernel: Kernel, segment: str, layers: Sequence[int]) -> Place:
    """Return the place of a segment's kernel; `layers` are the indices of the segment's layers in the model."""
    if segment in ("head", "vision"):
        return Place(None, _head_part(kernel) if segment == "head" else VISION)
    found = Counter(_named(node) for node in kernel.nodes)
    if not found:
        return Place(None, OTHER)
    product = is_product(kernel) or is_attention(kernel)
    if product or "Exp" in step_names(kernel):
        # A layer's kernel still belongs to the layer if masks, which belong to no layer, are fused into it.
        found = Counter({place: n for place, n in found.items() if place[1] != MASKS} or found)
    # The place with the most nodes wins. In a tie, norms win over masks, and every other part wins over norms.
    losers = (MASKS, NORMS)
    number, part = max(
        found,
        key=lambda place: (
            found[place],
            losers.index(place[1]) if place[1] in losers else len(losers),
        ),
    )
    integers = bool(kernel.outputs) and {each.dtype for each in kernel.outputs} <= _INTEGERS
    if part == EXPERTS and not product and integers:
        part = ROUTING
    layer = None if number is None or part == MASKS else layers[number]
    return Place(layer, part)


def _named(node: str) -> tuple[int | None, str]:
    """Return the number of a node's layer in the segment (None outside layers), and the node's part."""
    if past := _PAST.match(node):
        return int(past[1]), ATTENTION
    found = _LAYER.match(node)
    if found is None:
        return None, MASKS
    module = found[2] or ""
    for name, part in (
        ("attention", ATTENTION),
        ("router", ROUTING),
        ("experts", EXPERTS),
        ("mlp", MLP),
    ):
        if module == name or module.startswith(f"{name}."):
            return int(found[1]), part
    return int(found[1]), NORMS


def _head_part(kernel: Kernel) -> str:
    if any(node.startswith("signal_") for node in kernel.nodes):
        return SIGNAL
    return HEAD if is_product(kernel) and weight(kernel) is not None else SAMPLER
