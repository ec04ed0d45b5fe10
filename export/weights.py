"""Combines a checkpoint's tensors into the weights of graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.weight_names import (
    DECODER,
    ENCODER,
    HEAD_NORMS,
    LAYER_NORMS,
    Matrix,
    head_matrices,
    initializer_name,
    layer_matrices,
)
from canvasrt.errors import CanvasError
from canvasrt.export.checkpoint import Checkpoint

Sources = dict[str, tuple[str, ...]]
"""Name of a graph's weight → the checkpoint's tensors that are stacked along the first axis to form it."""

VISION_TOWER = "model.encoder.vision_tower"

# The dtypes in which weights need no scales.
_NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# The hint if scales are missing or broken.
DAMAGED = "the checkpoint is damaged: fetch it again, or quantize the bf16 checkpoint with canvasrt"

# The limits of a clipped product's inputs and outputs. A limit can be infinite.
_LIMITS = ("input_min", "input_max", "output_min", "output_max")

# The name that compressed-tensors gives a packed weight.
PACKED = "weight_packed"


def check_scales(values: npt.NDArray[Any], name: str, source: Path) -> None:
    """Raise CanvasError unless all scales of a tensor are positive and finite."""
    wrong = values[~(np.isfinite(values) & (values > 0))]
    if wrong.size:
        raise CanvasError(
            f"{name} in {source} is {wrong[0]}: a scale must be positive and finite", DAMAGED
        )


def check_finite(values: Tensor, name: str, source: str | Path) -> None:
    """Raise CanvasError if a tensor contains a number that is not finite."""
    if not all(map(torch.isfinite, torch.aminmax(values))):
        raise CanvasError(
            f"{name} in {source} contains numbers that are not finite",
            "the file is damaged: fetch or save it again",
        )


def body_sources(config: ModelConfig, first: int, count: int) -> Sources:
    """Return the sources of a body segment that has layers `first … first + count − 1`."""
    return {
        f"layers.{local}.{name}": tensors
        for local in range(count)
        for name, tensors in _layer_sources(config, first + local).items()
    }


def _layer_sources(config: ModelConfig, index: int) -> Sources:
    prefix = f"{DECODER}.layers.{index}"
    return {
        **_stacked(layer_matrices(config, index)),
        **{
            f"{ours}.weight": (f"{prefix}.{theirs}.weight",) for ours, theirs in LAYER_NORMS.items()
        },
        "router.scale": (f"{prefix}.router.scale",),
        "router.per_expert_scale": (f"{prefix}.router.per_expert_scale",),
        "encoder_scalar": (f"{ENCODER}.layers.{index}.layer_scalar",),
        "decoder_scalar": (f"{prefix}.layer_scalar",),
    }


def head_sources(config: ModelConfig) -> Sources:
    """Return the sources of the head."""
    return {
        **_stacked(head_matrices(config)),
        **{
            f"{ours}.weight": (f"{DECODER}.{theirs}.weight",) for ours, theirs in HEAD_NORMS.items()
        },
    }


def _stacked(found: Mapping[str, Matrix]) -> Sources:
    return {initializer_name(name): matrix.tensors for name, matrix in found.items()}


def vision_sources(config: ModelConfig) -> Sources:
    """Return the sources of the vision tower."""
    assert config.vision is not None
    sources: Sources = {
        "input_proj.weight": (f"{VISION_TOWER}.patch_embedder.input_proj.weight",),
        "positions": (f"{VISION_TOWER}.patch_embedder.position_embedding_table",),
        "projection.weight": ("model.encoder.embed_vision.embedding_projection.weight",),
    }
    if config.vision.get("standardize"):
        sources |= {name: (f"{VISION_TOWER}.{name}",) for name in ("std_bias", "std_scale")}
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
    for index in range(config.vision["num_hidden_layers"]):
        prefix = f"{VISION_TOWER}.encoder.layers.{index}"
        for ours, theirs in linears.items():
            sources[f"layers.{index}.{ours}.linear.weight"] = (f"{prefix}.{theirs}.linear.weight",)
            if config.vision.get("use_clipped_linears"):
                for name in _LIMITS:
                    sources[f"layers.{index}.{ours}.{name}"] = (f"{prefix}.{theirs}.{name}",)
        for ours, theirs in norms.items():
            sources[f"layers.{index}.{ours}.weight"] = (f"{prefix}.{theirs}.weight",)
    return sources


@dataclass(frozen=True)
class Weight:
    """One weight of a graph: its name and shape in the graph, and the checkpoint's tensors (`parts`) that form it.

    Parts are stacked along the first axis. If the checkpoint stores experts separately, every expert's matrix is a
    part.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    checkpoint: Checkpoint

    @property
    def rows(self) -> int:
        """The number of rows of all parts together."""
        split = len(self.shape) == 3 and len(self.parts) > 1
        return self.shape[0] * self.shape[1] if split else self.shape[0]

    def read(self, dtype: torch.dtype, check: bool = True) -> Iterator[Tensor]:
        """Yield the values in order, as `dtype`, in pieces along the parts' first axis. If `check` is true, raise
        CanvasError for a value that is not finite."""
        self.check()
        for part in self.parts:
            for chunk in self.checkpoint.chunks(part):
                if check:
                    known = chunk.clamp(-1, 1) if part.endswith(_LIMITS) else chunk
                    check_finite(known, part, self.checkpoint.file(part))
                yield chunk.to(dtype)

    def check(self) -> None:
        """Raise `CanvasError` for a part that is missing, has a different shape, or is not a plain weight."""
        rows = 0
        for part in self.parts:
            shape = self.checkpoint.shape(part) or (1,)
            self._check(part, shape)
            rows += shape[0]
        if rows != self.rows:
            self.refuse(" + ".join(self.parts), f"{rows} rows", f"{self.rows} rows")

    def refuse(self, part: str, found: str, wanted: str) -> NoReturn:
        """Raise `CanvasError` for a tensor that does not match the configuration."""
        raise CanvasError(
            f"{part} in {self.checkpoint.path} has {found}, but config.json asks for {wanted}",
            "use a checkpoint whose config.json and weights match",
        )

    def _check(self, part: str, shape: tuple[int, ...]) -> None:
        dtype = self.checkpoint.dtype(part)
        if dtype not in _NUMBERS:
            raise CanvasError(
                f"{part} in {self.checkpoint.path} is {str(dtype).removeprefix('torch.')}, but"
                " its scales, or the configuration that lists them, are missing",
                "fetch the checkpoint again with its hf_quant_config.json, or use the bf16 checkpoint",
            )
        kept = len(self.shape) - 1 if self.rows == self.shape[0] else 1
        whole = len(self.parts) == 1
        fits = shape == self.shape if whole else shape[1:] == self.shape[-kept:]
        if not fits:
            self.refuse(part, f"shape {shape}", f"{self.shape}")


def weights(module: nn.Module, sources: Sources, checkpoint: Checkpoint) -> list[Weight]:
    """Return every weight of `module` in a fixed order. `Weight.check` and `Weight.read` check the shapes."""
    named = dict(module.named_parameters())
    assert named.keys() == sources.keys(), named.keys() ^ sources.keys()
    return [
        Weight(name, shape, parts_of(sources[name], shape, checkpoint), checkpoint)
        for name, shape in ((name, tuple(each.shape)) for name, each in named.items())
    ]


def parts_of(
    sources: tuple[str, ...], shape: tuple[int, ...], checkpoint: Checkpoint
) -> tuple[str, ...]:
    """Return the sources. If the checkpoint stores each expert separately, return the experts' own tensors instead."""
    prefix, _, name = sources[0].rpartition(".")
    if len(shape) != 3 or sources[0] in checkpoint:
        return sources
    names = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    parts = tuple(f"{prefix}.{i}.{each}.weight" for i in range(shape[0]) for each in names)
    held = parts[0] in checkpoint or packed_name(parts[0]) in checkpoint
    return parts if held else sources


def packed_name(part: str) -> str:
    """Return the name under which compressed-tensors packs a weight in a checkpoint."""
    return part.removesuffix("weight") + PACKED
