"""Random checkpoints of many shapes, and their exported graphs in ONNX Runtime."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    Gemma4VisionConfig,
)

from canvasrt.bundle import Bundle, load_bundle
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.graphs.edit import insert
from tests.helpers import library

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "sliding_window": 64,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
    "use_bidirectional_attention": "vision",
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    # Three queries per key. Numbers of heads, experts and layers per segment are odd, and so are factors of the
    # vocabulary.
    "odd": {
        "vocab_size": 391,
        "hidden_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 24,
        "global_head_dim": 40,
        "num_global_key_value_heads": 9,
        "sliding_window": 16,
        "num_experts": 5,
        "top_k_experts": 3,
        "moe_intermediate_size": 48,
    },
    # The released model's head sizes, since heads of 512 have a different form in the graph; and a single expert.
    "wide_heads": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_experts": 1,
        "top_k_experts": 1,
        "sliding_window": 512,
    },
}


def random_model(
    shape: Mapping[str, Any], canvas: int = 16, vision: Mapping[str, Any] | None = None
) -> DiffusionGemmaForBlockDiffusion:
    """Return a model with large weights, so that predictions are far from uniform and depend on the position."""
    config = DiffusionGemmaConfig(
        text_config=DiffusionGemmaTextConfig(**{**BASE, **shape}),
        vision_config=Gemma4VisionConfig(
            **{
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "patch_size": 4,
                "position_embedding_size": 64,
                **(vision or {}),
            }
        ),
        canvas_length=canvas,
        boi_token_id=3,
        image_token_id=4,
        eoi_token_id=5,
    )
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(
                    values * (1.5 if "embed_tokens" in name else 1.0) * parameter.shape[-1] ** -0.5
                )
            else:
                # All norms differ, so that swapped weights are detected.
                parameter.copy_((1 + 0.2 * values) * (0.4 if "_norm" in name else 1.0))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.7 + 0.6 * torch.rand(buffer.shape, generator=generator))
            elif name.endswith(("std_bias", "std_scale")):
                buffer.copy_(torch.rand(buffer.shape, generator=generator))
            elif name.endswith(("_min", "_max")):
                buffer.copy_(torch.tensor(-2.0 if name.endswith("_min") else 1.5))
    return model


class Graphs:
    """The graphs of a bundle in ONNX Runtime. The head also outputs its logits."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.config: ModelConfig = bundle.manifest.model
        self.table = np.fromfile(bundle.path / "embedding.bin", np.float32).reshape(
            bundle.manifest.embedding["shape"]
        )
        self.sessions = {
            segment["name"]: _session(bundle.path / segment["file"])
            for segment in bundle.manifest.segments
        }
        self.bodies = [each for each in bundle.manifest.segments if "layers" in each]

    def run(self, name: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        session = self.sessions[name]
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def _session(file: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 2
    if file.name == "head.onnx":
        _expose_logits(file)
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _expose_logits(file: Path) -> None:
    """Make the logits, divided by the temperature, an output of the graph. They are the input of the head's
    ReduceMax."""
    model = ir.load(file)
    (largest,) = [node for node in model.graph if node.op_type == "ReduceMax"]
    logits = insert(model.graph, "Identity", [largest.inputs[0]], "logits")
    logits.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.append(logits)
    ir.save(model, file)


def exporter(folders: pytest.TempPathFactory) -> Callable[..., tuple[Any, Graphs]]:
    """Return a function that returns the reference model of a shape and its graphs, created once per shape."""

    @cache
    def make(shape: str) -> tuple[Any, Graphs]:
        graphs = library.graphs(f"random-{shape}", layers_per_segment=3)
        # A copy, since its head will be changed to output logits.
        folder = folders.mktemp(shape) / "graphs"
        shutil.copytree(graphs, folder)
        return random_model(SHAPES[shape]), Graphs(load_bundle(folder, check=False))

    return make
