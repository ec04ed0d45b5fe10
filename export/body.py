"""Consecutive transformer layers as one graph for both phases: encoding clean tokens and denoising a canvas."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.export.layers import (
    Attention,
    GatedMLP,
    RMSNorm,
    attention_mask,
    inverse_frequencies,
    placeholder,
    rms_norm,
    rotation,
)
from canvasrt.export.moe import Experts, Router, Slots


class BodyLayer(nn.Module):
    """Attention, then a dense MLP and the experts in parallel, then multiplication by the layer's scalar. Norms precede
    and follow attention, MLP and experts."""

    def __init__(self, config: ModelConfig, layer: Layer) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.eps = eps
        self.attention = Attention(config, layer)
        self.mlp = GatedMLP(size, config.intermediate_size)
        self.router = Router(config)
        self.experts = Experts(config)
        self.input_norm = RMSNorm(size, eps)
        self.post_attention_norm = RMSNorm(size, eps)
        self.pre_mlp_norm = RMSNorm(size, eps)
        self.post_mlp_norm = RMSNorm(size, eps)
        self.pre_experts_norm = RMSNorm(size, eps)
        self.post_experts_norm = RMSNorm(size, eps)
        self.post_norm = RMSNorm(size, eps)
        # Only these weights differ between encoding and denoising.
        self.encoder_scalar = placeholder(1)
        self.decoder_scalar = placeholder(1)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor,
        past: tuple[Tensor, Tensor],
        causal: Tensor,
        valid: Tensor,
        slots: Slots,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Map `x` `[1, B·L, D]` to the same shape. Also return this call's keys and values, and the experts' loads `[1,
        E]`.

        Outside attention, all requests' tokens share one axis, because TensorRT-RTX then quantizes in fewer kernels.
        """
        attended, key, value = self.attention(self.input_norm(x), turn, mask, *past)
        x = x + self.post_attention_norm(attended)
        # Normalize once for router, experts and MLP: their norms differ only in the weights.
        normed = rms_norm(x, self.eps)
        index, weights = self.router(normed)
        own = (normed * self.pre_experts_norm.weight).squeeze(0)
        mixed, load = self.experts(own, index, weights, valid.reshape(-1), slots)
        dense = self.post_mlp_norm(self.mlp(normed * self.pre_mlp_norm.weight))
        x = x + self.post_norm(dense + self.post_experts_norm(mixed))
        scalar = torch.where(causal, self.encoder_scalar, self.decoder_scalar)
        scalar = scalar.to(x.dtype)[:, None].expand_as(valid).reshape(1, -1, 1)
        return x * scalar, key, value, load


class BodySegment(nn.Module):
    """Layers `first … first + count − 1` of the model. Graph inputs and outputs are named as in `forward`."""

    def __init__(self, config: ModelConfig, first: int, count: int) -> None:
        super().__init__()
        self.window = config.sliding_window
        self.kinds = [layer.kind for layer in config.layers[first : first + count]]
        self.layers = nn.ModuleList(
            BodyLayer(config, layer) for layer in config.layers[first : first + count]
        )
        for layer in config.layers[first : first + count]:
            self.register_buffer(f"{layer.kind}_frequencies", inverse_frequencies(layer))

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        groups: Tensor,
        causal: Tensor,
        slots: Tensor,
        gate_slots: Tensor,
        gate_queues: Tensor,
        past_positions: dict[str, Tensor],
        past: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Run the layers over one call's tokens.

        Shapes: B rows, L tokens per row, D hidden size, E experts, O groups of eight cached tokens (octets). Hidden
        states, keys and values are bf16; in fp32 graphs, and in graphs quantized from fp32 graphs, they are float32. If
        the recipe has `kv_cache: fp8`, cached keys and values are E4M3. In the graph, names end with a layer's kind
        (`past_positions_full`) or its index (`past_key_0`, `past_value_0`, `new_key_0`, `new_value_0`).

        Args:
            hidden: `[B, L, D]`, the embeddings or the previous segment's output.
            positions: `[B, L]` int64; −1 marks padding, whose outputs are undefined.
            groups: `[B, L]` int64, the number of the token's image; −1 for text. Tokens of one image attend to each
            other.
            causal: `[B]` bool; true for a row of clean tokens (encode), false for a canvas (denoise).
            slots, gate_slots, gate_queues: int64. They become the fields `down`, `gate` and `gate_queues`, in this
            order, of `canvasrt.export.moe.Slots`.
            past_positions: for each kind of layer, the positions of cached tokens, `[B, O, 8]` int64; −1 marks an empty
            place.
            past: per layer, the cached keys and values `[B, kv_heads, O, 8, head_dim]`. O is at least 1.
        Returns:
            hidden `[B, L, D]` (in the graph `hidden_out`), the experts' loads `[layers, E]` int32, and, per layer, this
            call's keys and values `[B, kv_heads, L, head_dim]`. `chain` replaces the loads by `load`, `[layers]` int64:
            each layer's largest load.
        """
        masks, turns = {}, {}
        for kind, octets in past_positions.items():
            known = octets.flatten(1, 2)
            window = self.window if kind == "sliding" else None
            masks[kind] = attention_mask(positions, groups, causal, known, window, hidden.dtype)
            turns[kind] = rotation(positions, self.get_buffer(f"{kind}_frequencies"))
        valid = positions >= 0
        shape = hidden.shape
        hidden = hidden.reshape(1, shape[0] * shape[1], shape[2])
        filled = Slots(gate_queues, gate_slots, slots)
        loads, new = [], []
        for kind, layer, cached in zip(self.kinds, self.layers, past, strict=True):
            joined = (cached[0].flatten(2, 3), cached[1].flatten(2, 3))
            hidden, key, value, load = layer(
                hidden, turns[kind], masks[kind], joined, causal, valid, filled
            )
            loads.append(load)
            new.append((key, value))
        return hidden.view(shape), torch.cat(loads), new
