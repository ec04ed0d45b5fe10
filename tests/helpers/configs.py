"""Model configurations: a small one with both kinds of layer, and the released one."""

from __future__ import annotations

from canvasrt.checkpoints.config import Layer, ModelConfig

# No server compiles more sizes of passes before its first request.
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


_SLIDING = Layer("sliding", 256, 8, 10_000.0, 1.0)

_FULL = Layer("full", 512, 2, 1_000_000.0, 0.25)

RELEASED = ModelConfig(
    hidden_size=2816,
    intermediate_size=2112,
    moe_intermediate_size=704,
    num_experts=128,
    top_k_experts=8,
    vocab_size=262_144,
    num_attention_heads=16,
    layers=tuple(_FULL if i % 6 == 5 else _SLIDING for i in range(30)),
    sliding_window=1024,
    rms_norm_eps=1e-6,
    logit_softcap=30.0,
    canvas_length=256,
    max_position_embeddings=262_144,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_ids=(1, 106, 50),
)
