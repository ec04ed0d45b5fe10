"""The configuration of the released model, google/diffusiongemma-26B-A4B-it, for estimates of what fits a target."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from canvasrt.checkpoints.config import FULL_EVERY, ModelConfig, read_config

TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "sliding_window": 1024,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
# This tower has about 550M parameters.
VISION_CONFIG: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "head_dim": 72,
    "patch_size": 16,
    "pooling_kernel_size": 3,
}


def layer_types(count: int) -> list[str]:
    """Return the kind of attention in each of `count` layers: full in every sixth layer and, as transformers requires,
    in the last layer."""
    return [
        "full_attention" if (i + 1) % FULL_EVERY == 0 or i + 1 == count else "sliding_attention"
        for i in range(count)
    ]


@cache
def released_model() -> ModelConfig:
    """Return the released model's configuration, including its vision tower."""
    text = {"model_type": "diffusion_gemma_text", **TEXT_CONFIG, "layer_types": layer_types(30)}
    config = {"model_type": "diffusion_gemma", "canvas_length": 256, "text_config": text}
    model, _ = read_config(config, None)
    return replace(model, vision=VISION_CONFIG)
