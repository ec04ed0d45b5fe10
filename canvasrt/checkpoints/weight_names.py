"""The network's weights: their names, their shapes, and the checkpoint's tensors that are stacked to form each
weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from canvasrt.checkpoints.config import ModelConfig

DECODER = "model.decoder"
ENCODER = "model.encoder.language_model"
# The embedding table, which is also the matrix of the final projection.
TABLE = "table"
# A quantized copy of the embedding table for its two matrix products. Lookups then use the table in 16 bits.
PROJECTION = "projection"
GATE_UP, DOWN, ROUTER = "experts.gate_up", "experts.down", "router.proj"
# Our name of a layer's norm → its name in the checkpoint.
LAYER_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm_1",
    "pre_experts_norm": "pre_feedforward_layernorm_2",
    "post_experts_norm": "post_feedforward_layernorm_2",
    "post_norm": "post_feedforward_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}
HEAD_NORMS = {"norm": "norm", "signal_norm": "self_conditioning.pre_norm"}


@dataclass(frozen=True)
class Matrix:
    """A weight's shape, `[out, in]` or `[E, out, in]`, and the checkpoint's tensors that form it, stacked along the
    first axis."""

    shape: tuple[int, ...]
    tensors: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """The number of inputs, the last axis."""
        return self.shape[-1]


def layer_matrices(config: ModelConfig, index: int) -> dict[str, Matrix]:
    """Return one layer's matrices, keyed by their names within the layer."""
    layer, size, inner = config.layers[index], config.hidden_size, config.moe_intermediate_size
    prefix = f"{DECODER}.layers.{index}"
    queries, keys = (
        count * layer.head_dim for count in (config.num_attention_heads, layer.num_kv_heads)
    )
    # Full layers share one projection for keys and values.
    projections = ("q", "k") if layer.kind == "full" else ("q", "k", "v")
    rows = queries + (len(projections) - 1) * keys
    return {
        "attention.qkv": Matrix(
            (rows, size), tuple(f"{prefix}.self_attn.{each}_proj.weight" for each in projections)
        ),
        "attention.o": Matrix((size, queries), (f"{prefix}.self_attn.o_proj.weight",)),
        **_mlp(config, "mlp", f"{prefix}.mlp"),
        ROUTER: Matrix((config.num_experts, size), (f"{prefix}.router.proj.weight",)),
        GATE_UP: Matrix((config.num_experts, 2 * inner, size), (f"{prefix}.experts.gate_up_proj",)),
        DOWN: Matrix((config.num_experts, size, inner), (f"{prefix}.experts.down_proj",)),
    }


def head_matrices(config: ModelConfig) -> dict[str, Matrix]:
    """Return the matrices outside the layers, except the vision tower's."""
    return {
        **_mlp(config, "signal_mlp", f"{DECODER}.self_conditioning"),
        TABLE: Matrix((config.vocab_size, config.hidden_size), (f"{DECODER}.embed_tokens.weight",)),
    }


def matrices(config: ModelConfig) -> dict[str, Matrix]:
    """Return every matrix except the vision tower's, keyed by global names such as `layers.3.mlp.down`."""
    return {
        f"layers.{index}.{name}": matrix
        for index in range(len(config.layers))
        for name, matrix in layer_matrices(config, index).items()
    } | head_matrices(config)


def norms(config: ModelConfig) -> list[str]:
    """Return the global names of the norms."""
    every = range(len(config.layers))
    return [*(f"layers.{index}.{name}" for index in every for name in LAYER_NORMS), *HEAD_NORMS]


def initializer_name(name: str) -> str:
    """Return the name of a weight's initializer. A layer number in `name` must be the layer's number within the
    graph."""
    return name if name == TABLE or name.endswith((GATE_UP, DOWN)) else f"{name}.weight"


def local_names(segment: str, layers: Sequence[int], names: Iterable[str]) -> dict[str, str]:
    """Return global name → initializer's name, for all `names` that are in the segment. `layers` are the segment's
    layers."""
    if not layers:
        own = [name for name in names if not name.startswith("layers.")]
        return {name: initializer_name(name) for name in own} if segment == "head" else {}
    place = {layer: number for number, layer in enumerate(layers)}
    found = {}
    for name in names:
        kind, _, rest = name.partition(".")
        layer, _, rest = rest.partition(".")
        if kind == "layers" and int(layer) in place:
            found[name] = f"layers.{place[int(layer)]}.{initializer_name(rest)}"
    return found


def global_name(segment: str, layers: Sequence[int], name: str) -> str:
    """Return an initializer's global name: the inverse of `local_names`. `layers` are the segment's layers."""
    name = name.removesuffix(".weight")
    if not layers:
        return name if segment == "head" else f"{segment}.{name}"
    first, place, rest = name.split(".", 2)
    assert first == "layers", name
    return f"layers.{layers[int(place)]}.{rest}"


def _mlp(config: ModelConfig, name: str, prefix: str) -> dict[str, Matrix]:
    size, inner = config.hidden_size, config.intermediate_size
    both = tuple(f"{prefix}.{each}_proj.weight" for each in ("gate", "up"))
    return {
        f"{name}.gate_up": Matrix((2 * inner, size), both),
        f"{name}.down": Matrix((size, inner), (f"{prefix}.down_proj.weight",)),
    }
