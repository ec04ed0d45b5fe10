"""Which checkpoint tensors each weight of a graph is made of, and how they are put together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from canvasrt.errors import CanvasError
from canvasrt.export.checkpoint import Checkpoint
from canvasrt.model import Layer, ModelConfig

Sources = dict[str, tuple[str, ...]]
"""A graph's weight → the checkpoint tensors that are stacked along the first axis to make it."""

DECODER = "model.decoder"
ENCODER = "model.encoder.language_model"
VISION = "model.encoder.vision_tower"

_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm_1",
    "pre_experts_norm": "pre_feedforward_layernorm_2",
    "post_experts_norm": "post_feedforward_layernorm_2",
    "post_norm": "post_feedforward_layernorm",
}


def body_sources(config: ModelConfig, first: int, count: int) -> Sources:
    """Sources of a body segment over layers `first … first + count − 1`."""
    sources: Sources = {}
    for local, layer in enumerate(config.layers[first : first + count]):
        for name, tensors in _layer_sources(layer, first + local).items():
            sources[f"layers.{local}.{name}"] = tensors
    return sources


def _layer_sources(layer: Layer, index: int) -> Sources:
    prefix = f"{DECODER}.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    projections = ("q_proj", "k_proj") if layer.kind == "full" else ("q_proj", "k_proj", "v_proj")
    return {
        "attention.qkv.weight": tuple(f"{attention}.{name}.weight" for name in projections),
        "attention.o.weight": (f"{attention}.o_proj.weight",),
        "attention.q_norm.weight": (f"{attention}.q_norm.weight",),
        "attention.k_norm.weight": (f"{attention}.k_norm.weight",),
        "mlp.gate_up.weight": (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
        "mlp.down.weight": (f"{mlp}.down_proj.weight",),
        "router.proj.weight": (f"{prefix}.router.proj.weight",),
        "router.scale": (f"{prefix}.router.scale",),
        "router.per_expert_scale": (f"{prefix}.router.per_expert_scale",),
        "experts.gate_up": (f"{prefix}.experts.gate_up_proj",),
        "experts.down": (f"{prefix}.experts.down_proj",),
        "encoder_scalar": (f"{ENCODER}.layers.{index}.layer_scalar",),
        "decoder_scalar": (f"{prefix}.layer_scalar",),
        **{f"{ours}.weight": (f"{prefix}.{theirs}.weight",) for ours, theirs in _NORMS.items()},
    }


def head_sources() -> Sources:
    """Sources of the head."""
    signal = f"{DECODER}.self_conditioning"
    return {
        "table": (f"{DECODER}.embed_tokens.weight",),
        "norm.weight": (f"{DECODER}.norm.weight",),
        "signal_norm.weight": (f"{signal}.pre_norm.weight",),
        "signal_mlp.gate_up.weight": (f"{signal}.gate_proj.weight", f"{signal}.up_proj.weight"),
        "signal_mlp.down.weight": (f"{signal}.down_proj.weight",),
    }


def vision_sources(config: ModelConfig) -> Sources:
    """Sources of the vision tower."""
    assert config.vision is not None
    sources: Sources = {
        "input_proj.weight": (f"{VISION}.patch_embedder.input_proj.weight",),
        "positions": (f"{VISION}.patch_embedder.position_embedding_table",),
        "projection.weight": ("model.encoder.embed_vision.embedding_projection.weight",),
    }
    if config.vision.get("standardize"):
        sources |= {name: (f"{VISION}.{name}",) for name in ("std_bias", "std_scale")}
    linears = {
        **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
        **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    }
    norms = {
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "input_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    }
    ranges = ("input_min", "input_max", "output_min", "output_max")
    for index in range(config.vision["num_hidden_layers"]):
        prefix = f"{VISION}.encoder.layers.{index}"
        for ours, theirs in linears.items():
            sources[f"layers.{index}.{ours}.linear.weight"] = (f"{prefix}.{theirs}.linear.weight",)
            if config.vision.get("use_clipped_linears"):
                for name in ranges:
                    sources[f"layers.{index}.{ours}.{name}"] = (f"{prefix}.{theirs}.{name}",)
        for ours, theirs in norms.items():
            sources[f"layers.{index}.{ours}.weight"] = (f"{prefix}.{theirs}.weight",)
    return sources


@dataclass(frozen=True)
class Weight:
    """One weight of a graph: its name there, its shape, and the parts that make it, read one at a time."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    checkpoint: Checkpoint

    def read(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """The parts in order, as `dtype`; stacked along the first axis they have `shape`."""
        rows = 0
        for part in self.parts:
            tensor = self.checkpoint.read(part)
            if tensor.dim() == 0:
                tensor = tensor[None]
            self._check(part, tensor)
            rows += tensor.shape[0]
            yield tensor.to(dtype)
        if rows != self.shape[0]:
            self._refuse(" + ".join(self.parts), f"{rows} rows", f"{self.shape[0]} rows")

    def _check(self, part: str, tensor: Tensor) -> None:
        whole = len(self.parts) == 1
        fits = tuple(tensor.shape) == self.shape if whole else tensor.shape[1:] == self.shape[1:]
        if not fits:
            self._refuse(part, f"shape {tuple(tensor.shape)}", f"{self.shape}")

    def _refuse(self, part: str, found: str, wanted: str) -> None:
        raise CanvasError(
            f"{part} in {self.checkpoint.path} has {found}, but config.json asks for {wanted}",
            "use a checkpoint whose config.json and weights belong together",
        )


def weights(module: nn.Module, sources: Sources, checkpoint: Checkpoint) -> list[Weight]:
    """Every weight of `module`, in a fixed order; the module's own shapes are what the checkpoint is held to."""
    named = dict(module.named_parameters())
    assert named.keys() == sources.keys(), named.keys() ^ sources.keys()
    return [
        Weight(name, tuple(parameter.shape), sources[name], checkpoint)
        for name, parameter in named.items()
    ]


def load(module: nn.Module, sources: Sources, checkpoint: Checkpoint) -> None:
    """Put the checkpoint's values into `module`, whole and in memory."""
    for weight in weights(module, sources, checkpoint):
        parameter = module.get_parameter(weight.name)
        parameter.data = torch.cat(list(weight.read(parameter.dtype)))
