"""The demo's configuration, and a forward pass that trains fast on a CPU.

The weights are in the stock `transformers` class, whose forward pass loops over the experts and builds a cache. The
forward pass here runs every expert on every token; the result is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    Gemma4VisionConfig,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
)

from bench.demo import tokenizer as tok
from canvasrt.defaults import SOFT_TOKENS

CANVAS_LENGTH = 32
# The side of a patch in pixels, and the side of a soft token in patches.
PATCH, POOL = 4, 3

# A module of the stock class. Its attributes have no declared types.
Stock = Any

# Encoder and decoder have different scalars, as in the released model. All are exact in bf16.
ENCODER_LAYER_SCALARS = (1.0, 0.875, 1.125, 0.9375)
DECODER_LAYER_SCALARS = (1.125, 1.0, 0.875, 1.0625)


def _vision_config(sees: bool) -> Gemma4VisionConfig:
    # The class always builds a vision tower, so a model without images gets the smallest possible one.
    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads, positions = 1, 16
    if sees:
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        # The longest picture is one soft token high.
        heads, positions = 2, SOFT_TOKENS * POOL
    return Gemma4VisionConfig(
        **size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=16,
        patch_size=PATCH,
        pooling_kernel_size=POOL,
        position_embedding_size=positions,
    )


def build_config(sees: bool = False) -> DiffusionGemmaConfig:
    """Return the released configuration's fields, at a size that a CPU can train.

    `sees`: whether the vision tower is large enough to be trained.
    """
    # The class accepts these fields without declaring them.
    undeclared: dict[str, Any] = {
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
    }
    text = DiffusionGemmaTextConfig(
        **undeclared,
        vocab_size=tok.VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=32,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attention_bias=False,
        attention_dropout=0.0,
        use_bidirectional_attention="vision",
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
        pad_token_id=tok.PAD,
        eos_token_id=tok.EOS,
        bos_token_id=tok.BOS,
    )
    return DiffusionGemmaConfig(
        text_config=text,
        vision_config=_vision_config(sees),
        canvas_length=CANVAS_LENGTH,
        boi_token_id=tok.IMAGE_START,
        eoi_token_id=tok.IMAGE_END,
        image_token_id=tok.IMAGE_ID,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def build_generation_config() -> DiffusionGemmaGenerationConfig:
    """Return the released checkpoint's sampler settings. An answer ends with the turn."""
    return DiffusionGemmaGenerationConfig(
        max_new_tokens=256,
        max_denoising_steps=48,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=0.1),
        t_min=0.4,
        t_max=0.8,
        stability_threshold=1,
        confidence_threshold=0.005,
        pad_token_id=tok.PAD,
        bos_token_id=tok.BOS,
        eos_token_id=[tok.EOS, tok.TURN_END_ID],
    )


def build_model() -> DiffusionGemmaForBlockDiffusion:
    """Return a model to train, in fp32."""
    model: Stock = DiffusionGemmaForBlockDiffusion(build_config()).float()
    model.generation_config = build_generation_config()
    for module in model.model.decoder.layers.modules():
        if hasattr(module, "q_norm"):
            # The model does not divide attention scores by sqrt(head_dim), so q_norm starts at 1 / sqrt(head_dim).
            nn.init.constant_(module.q_norm.weight, module.head_dim**-0.5)
    # The stock class initializes the embedding of padding to zero, where a norm's gradient is unbounded.
    nn.init.normal_(model.model.decoder.embed_tokens.weight, std=0.05)
    with torch.no_grad():
        for phase, scalars in (
            (model.model.encoder.language_model, ENCODER_LAYER_SCALARS),
            (model.model.decoder, DECODER_LAYER_SCALARS),
        ):
            for layer, scalar in zip(phase.layers, scalars, strict=True):
                layer.layer_scalar.fill_(scalar)
    return model


def sees(config: DiffusionGemmaConfig) -> bool:
    """Return whether a demo's vision tower is large enough to be trained."""
    vision: Any = config.vision_config
    return bool(vision.num_hidden_layers > 1)


def add_sight(blind: Stock) -> DiffusionGemmaForBlockDiffusion:
    """Return the same model with an untrained vision tower of a useful size, in fp32."""
    model: Stock = DiffusionGemmaForBlockDiffusion(build_config(sees=True)).float()
    model.generation_config = build_generation_config()
    known = {name: value for name, value in blind.state_dict().items() if "vision" not in name}
    left_out = model.load_state_dict(known, strict=False)
    assert not left_out.unexpected_keys
    assert all("vision" in each for each in left_out.missing_keys)
    tower = model.model.encoder.vision_tower
    nn.init.zeros_(tower.patch_embedder.position_embedding_table)
    for name, parameter in tower.named_parameters():
        if parameter.ndim == 2:
            nn.init.orthogonal_(parameter)
        elif name.endswith("q_norm.weight"):
            nn.init.constant_(parameter, parameter.numel() ** -0.5)
    # Image features then have the magnitude of text embeddings.
    scale = (
        model.model.decoder.embed_tokens.weight.std() * model.config.text_config.hidden_size**0.5
    )
    projection = model.model.encoder.embed_vision.embedding_projection.weight
    nn.init.normal_(projection, std=float(scale.detach()) * projection.shape[1] ** -0.5)
    return model


@dataclass
class Prefix:
    """The keys and values of left-padded clean tokens in every layer, to which the canvas attends."""

    keys: list[Tensor]  # [batch, KV heads, prefix length, head dim] per layer
    values: list[Tensor]
    padding: Tensor  # [batch, prefix length], True for padding
    balance: Tensor  # the load-balancing loss, summed over layers


class FastForward:
    """Runs the text layers of a stock model: encodes once, then denoises as often as needed."""

    def __init__(self, model: Stock) -> None:
        self.config = model.config.text_config
        self.decoder = model.model.decoder
        self.see = model.model.encoder.get_image_features
        self.encoder_scalars = [
            layer.layer_scalar for layer in model.model.encoder.language_model.layers
        ]
        self.decoder_scalars = [layer.layer_scalar for layer in self.decoder.layers]

    def encode(self, tokens: Tensor, padding: Tensor, features: Tensor | None = None) -> Prefix:
        """Run a causal pass over left-padded clean tokens [batch, length].

        `features` [soft tokens of the whole batch, width] replace the embeddings of the image tokens. Tokens of the
        same image see each other.
        """
        length = tokens.shape[1]
        age = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        # Padding sees itself; otherwise its softmax would have no terms.
        causal = ((age >= 0) & ~padding[:, None, None, :]) | (age == 0)
        masks = {
            "full_attention": causal,
            "sliding_attention": causal & (age < self.config.sliding_window),
        }
        hidden = self._embed(tokens)
        if features is not None:
            inside = tokens == tok.IMAGE_ID
            hidden = hidden.masked_scatter(inside[..., None], features)
            group = (inside & ~inside.roll(1, -1)).cumsum(-1)
            same = (group[:, :, None] == group[:, None, :]) & inside[:, :, None] & inside[:, None]
            masks = {kind: mask | same[:, None] for kind, mask in masks.items()}
        rotary = self._rotary(hidden, 0, length)
        prefix = Prefix([], [], padding, hidden.new_zeros(()))
        for layer, kind, scalar in zip(
            self.decoder.layers, self.config.layer_types, self.encoder_scalars, strict=True
        ):
            query, key, value = _project(
                layer.self_attn, _norm(layer.input_layernorm, hidden), rotary[kind]
            )
            prefix.keys.append(key)
            prefix.values.append(value)
            attended = _attend(layer.self_attn, query, key, value, masks[kind])
            hidden, balance = _finish_layer(layer, hidden, attended, scalar)
            prefix.balance = prefix.balance + balance
        return prefix

    def denoise(
        self, canvas: Tensor, prefix: Prefix, signal_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return logits [batch, canvas, vocabulary] of one denoising step, and its load-balancing
        loss.

        `signal_logits` are the previous step's logits, divided by that step's temperature; None in the first step.
        """
        embeddings = self._embed(canvas)
        hidden = self._condition(embeddings, signal_logits)
        past, length = prefix.padding.shape[1], canvas.shape[1]
        rotary = self._rotary(hidden, past, length)
        seen = F.pad(~prefix.padding, (0, length), value=True)[:, None, None, :]
        # A sliding layer's cache keeps one token fewer than its window.
        recent = torch.arange(past + length) > past - self.config.sliding_window
        masks = {"full_attention": seen, "sliding_attention": seen & recent}
        total_balance = hidden.new_zeros(())
        for i, (layer, kind) in enumerate(
            zip(self.decoder.layers, self.config.layer_types, strict=True)
        ):
            query, key, value = _project(
                layer.self_attn, _norm(layer.input_layernorm, hidden), rotary[kind]
            )
            key = torch.cat([prefix.keys[i], key], dim=2)
            value = torch.cat([prefix.values[i], value], dim=2)
            attended = _attend(layer.self_attn, query, key, value, masks[kind])
            hidden, balance = _finish_layer(layer, hidden, attended, self.decoder_scalars[i])
            total_balance = total_balance + balance
        logits = _norm(self.decoder.norm, hidden) @ self.decoder.embed_tokens.weight.T
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap, total_balance

    def _embed(self, tokens: Tensor) -> Tensor:
        table = self.decoder.embed_tokens
        return F.embedding(tokens, table.weight) * table.embed_scale

    def _condition(self, embeddings: Tensor, signal_logits: Tensor | None) -> Tensor:
        module, table = self.decoder.self_conditioning, self.decoder.embed_tokens
        if signal_logits is not None:
            # Without biases, the gated MLP's output is zero if the signal is.
            signal = signal_logits.softmax(-1) @ table.weight * table.embed_scale
            embeddings = embeddings + _gated_mlp(module, _norm(module.pre_norm, signal))
        return _norm(module.post_norm, embeddings)

    def _rotary(self, hidden: Tensor, start: int, length: int) -> dict[str, tuple[Tensor, Tensor]]:
        positions = torch.arange(start, start + length)[None]
        return {
            kind: self.decoder.rotary_emb(hidden, positions, kind)
            for kind in set(self.config.layer_types)
        }


class _RMSNorm(torch.autograd.Function):
    """RMSNorm in few passes over memory. On a CPU, the stock RMSNorm takes a quarter of a training step."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).square()
        scale = (mean_square / hidden.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(hidden, weight, scale)
        normed = hidden * scale
        return normed if weight is None else normed.mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight, scale = ctx.saved_tensors
        weight_grad = None
        if weight is not None:
            product = (grad * hidden).flatten(0, -2)
            weight_grad = scale.reshape(1, -1).matmul(product)[0]
            grad = grad * weight
        shrink = torch.linalg.vecdot(grad, hidden).unsqueeze(-1) / hidden.shape[-1] * scale.pow(3)
        return torch.addcmul(grad * scale, hidden, shrink, value=-1), weight_grad, None


def _norm(module: Stock, hidden: Tensor) -> Tensor:
    return _RMSNorm.apply(hidden, getattr(module, "weight", None), module.eps)


def _gated_mlp(module: Stock, hidden: Tensor) -> Tensor:
    gate = F.gelu(module.gate_proj(hidden), approximate="tanh")
    return module.down_proj(gate * module.up_proj(hidden))


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def _project(
    attention: Stock, hidden: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, [batch, heads, length, head dim]."""
    cos, sin = (table[:, None] for table in rotary)

    def heads(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

    query = heads(attention.q_proj(hidden))
    key = heads(attention.k_proj(hidden))
    value = key if attention.v_proj is None else heads(attention.v_proj(hidden))
    query = _rotate(_norm(attention.q_norm, query), cos, sin)
    key = _rotate(_norm(attention.k_norm, key), cos, sin)
    return query, key, _norm(attention.v_norm, value)


def _attend(attention: Stock, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=1.0, enable_gqa=True
    )
    return attention.o_proj(attended.transpose(1, 2).flatten(2))


def _finish_layer(
    layer: Stock, hidden: Tensor, attended: Tensor, scalar: Tensor
) -> tuple[Tensor, Tensor]:
    """Run everything after attention: the shared MLP next to the routed experts."""
    hidden = hidden + _norm(layer.post_attention_layernorm, attended)
    shared = _gated_mlp(layer.mlp, _norm(layer.pre_feedforward_layernorm, hidden))
    shared = _norm(layer.post_feedforward_layernorm_1, shared)
    weights, balance = _route(layer.router, hidden)
    routed = _dense_experts(
        layer.experts, _norm(layer.pre_feedforward_layernorm_2, hidden), weights
    )
    routed = _norm(layer.post_feedforward_layernorm_2, routed)
    hidden = hidden + _norm(layer.post_feedforward_layernorm, shared + routed)
    return hidden * scalar, balance


def _route(router: Stock, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return every expert's weight for every token [batch, length, experts], mostly zeros."""
    scaled = _norm(router.norm, hidden) * router.scale * router.scalar_root_size
    probabilities = router.proj(scaled).softmax(-1)
    top, chosen = probabilities.topk(router.config.top_k_experts, dim=-1)
    top = top / top.sum(-1, keepdim=True) * router.per_expert_scale[chosen]
    weights = torch.zeros_like(probabilities).scatter(-1, chosen, top)
    # Switch Transformer's loss: 1 if all experts get equal shares.
    share = (weights.detach() > 0).float().flatten(0, 1).mean(0) / router.config.top_k_experts
    balance = (share * probabilities.flatten(0, 1).mean(0)).sum() * router.config.num_experts
    return weights, balance


def _dense_experts(experts: Stock, hidden: Tensor, weights: Tensor) -> Tensor:
    """Run every expert on every token. With this few experts, that is cheaper than sorting tokens."""
    projected = hidden @ experts.gate_up_proj.flatten(0, 1).T
    gate, up = projected.unflatten(-1, (experts.num_experts, -1)).chunk(2, dim=-1)
    activated = F.gelu(gate, approximate="tanh") * up * weights[..., None]
    return activated.flatten(-2) @ experts.down_proj.transpose(1, 2).flatten(0, 1)
