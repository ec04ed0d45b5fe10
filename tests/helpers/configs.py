"""Model configurations: a small one with both kinds of layers, and the released one."""

from __future__ import annotations

from dataclasses import replace

from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.checkpoints.released import released_model

# The most pass shapes that a server may compile before its first request.
MAX_SHAPES = 24

LAYERS = (Layer("sliding", 2, 3, 1e4, 1.0), Layer("full", 4, 1, 1e6, 0.25))

CONFIG = ModelConfig(
    hidden_size=8,
    intermediate_size=8,
    moe_intermediate_size=8,
    num_experts=8,
    top_k_experts=2,
    vocab_size=512,
    num_attention_heads=3,
    layers=LAYERS,
    sliding_window=5,
    rms_norm_eps=1e-6,
    logit_softcap=30.0,
    canvas_length=4,
    max_position_embeddings=4096,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_ids=(1,),
)

# The released model, without its vision tower.
RELEASED = replace(released_model(), vision=None)
