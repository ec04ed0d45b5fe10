"""Writes the layers of an INT4 checkpoint as llama.cpp's `gemma4`: the same codes, scales and norms, in Q4_0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.export.checkpoint import Checkpoint

BLOCK = 32  # weights per block of Q4_0, which has one scale in float16
CONTEXT = 4096
_HALF = BLOCK // 2
# GGUF's name of each of a layer's norms and scales, by the checkpoint's.
_PLAIN = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
_PACKED = {
    "self_attn.q_proj": "attn_q.weight",
    "self_attn.k_proj": "attn_k.weight",
    "self_attn.v_proj": "attn_v.weight",
    "self_attn.o_proj": "attn_output.weight",
    "mlp.gate_proj": "ffn_gate.weight",
    "mlp.up_proj": "ffn_up.weight",
    "mlp.down_proj": "ffn_down.weight",
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. `shape` is that of the stored array: bytes if it is packed, float32 otherwise."""

    name: str
    shape: tuple[int, ...]
    packed: bool
    read: Callable[[], np.ndarray]


def write_gguf(checkpoint: Path, config: ModelConfig, table: np.ndarray, out: Path) -> None:
    """Write a checkpoint in compressed-tensors' W4A16 to the file `out`, one tensor in memory at a time.

    `table` holds the embeddings, float32 `[vocab_size, hidden_size]`. There is no tokenizer.
    """
    import gguf

    writer = gguf.GGUFWriter(out, "gemma4")
    _describe(writer, config)
    pieces = list(_pieces(Checkpoint(checkpoint), config, table))
    for each in pieces:
        dtype = np.dtype(np.uint8 if each.packed else np.float32)
        kind = gguf.GGMLQuantizationType.Q4_0 if each.packed else None
        size = int(np.prod(each.shape)) * dtype.itemsize
        writer.add_tensor_info(each.name, each.shape, dtype, size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each in pieces:
        writer.write_tensor_data(each.read())
    writer.close()


def q4_0(words: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return Q4_0 blocks, uint8 `[out, bytes]`, of int32 words `[out, in / 8]` and scales `[out, groups]`.

    A block is a float16 scale and 16 bytes; byte i has codes i and i + 16. The values stay the same: both formats add
    8 to a code, and every bfloat16 scale in float16's range is a float16.
    """
    pairs = np.ascontiguousarray(words).view(np.uint8)
    codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(len(words), -1, BLOCK)
    low, high = codes[..., :_HALF], codes[..., _HALF:]
    each = np.repeat(scales, codes.shape[1] // scales.shape[1], 1)
    half = each.astype(np.float16)
    assert np.array_equal(half.astype(np.float32), each)
    blocks = np.concatenate([half[..., None].view(np.uint8), low | high << 4], -1)
    return blocks.reshape(len(words), -1)


def _describe(writer: Any, config: ModelConfig) -> None:
    """Add the configuration. Keys without a suffix are those of full layers."""
    sliding = next(each for each in config.layers if each.kind == "sliding")
    full = next(each for each in config.layers if each.kind == "full")
    writer.add_block_count(len(config.layers))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.top_k_experts)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([each.num_kv_heads for each in config.layers])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([each.kind == "sliding" for each in config.layers])
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_key_length_swa(sliding.head_dim)
    writer.add_value_length_swa(sliding.head_dim)
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_rope_dimension_count_swa(sliding.head_dim)
    writer.add_rope_freq_base(full.rope_theta)
    writer.add_rope_freq_base_swa(sliding.rope_theta)
    writer.add_final_logit_softcapping(config.logit_softcap)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_shared_kv_layers(0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _pieces(checkpoint: Checkpoint, config: ModelConfig, table: np.ndarray) -> Iterator[GgufTensor]:
    def plain(name: str, source: str) -> GgufTensor:
        values = checkpoint.read(source).float().numpy()
        return GgufTensor(name, values.shape, False, lambda: values)

    yield GgufTensor("token_embd.weight", table.shape, False, lambda: table)
    yield plain("output_norm.weight", "model.decoder.norm.weight")
    full = next(each for each in config.layers if each.kind == "full")
    factors = _rope_factors(full)
    yield GgufTensor("rope_freqs.weight", factors.shape, False, lambda: factors)
    for i, layer in enumerate(config.layers):
        prefix = f"model.decoder.layers.{i}."
        scalar = f"model.encoder.language_model.layers.{i}.layer_scalar"
        yield plain(f"blk.{i}.layer_output_scale.weight", scalar)
        for source, name in _PLAIN.items():
            yield plain(f"blk.{i}.{name}", prefix + source)
        for source, name in _PACKED.items():
            if layer.kind == "sliding" or source != "self_attn.v_proj":
                yield _packed(checkpoint, f"blk.{i}.{name}", [[prefix + source]])
        for names, name in ((("gate_proj", "up_proj"), "gate_up"), (("down_proj",), "down")):
            experts = [
                [f"{prefix}experts.{expert}.{each}" for each in names]
                for expert in range(config.num_experts)
            ]
            yield _packed(checkpoint, f"blk.{i}.ffn_{name}_exps.weight", experts)


def _packed(checkpoint: Checkpoint, name: str, experts: list[list[str]]) -> GgufTensor:
    """Return the stacked matrices of `experts`, each concatenated from its modules; one alone is not stacked."""

    def matrix(module: str) -> np.ndarray:
        scales = checkpoint.read(f"{module}.weight_scale").float().numpy()
        return q4_0(checkpoint.read(f"{module}.weight_packed").numpy(), scales)

    def read() -> np.ndarray:
        found = [np.concatenate([matrix(module) for module in modules]) for modules in experts]
        return found[0] if len(found) == 1 else np.stack(found)

    rows, width = np.concatenate([matrix(module) for module in experts[0]]).shape
    return GgufTensor(
        name, (rows, width) if len(experts) == 1 else (len(experts), rows, width), True, read
    )


def _rope_factors(layer: Layer) -> np.ndarray:
    """Return what a full layer's frequencies are divided by: only the first `rope_partial` of them rotate."""
    factors = np.full(layer.head_dim // 2, 1e30, np.float32)
    factors[: int(layer.head_dim * layer.rope_partial / 2)] = 1
    return factors
