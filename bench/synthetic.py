"""Writes random checkpoints of real shapes, to measure sizes and speeds, which do not depend on trained weights.

They have the Hugging Face layout and are written one layer at a time, to save memory. `python -m bench checkpoint` runs
it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import canvasrt
from canvasrt.checkpoints.config import ModelConfig, read_config
from canvasrt.checkpoints.locate import INDEX
from canvasrt.checkpoints.released import TEXT_CONFIG, layer_types
from canvasrt.export.segments import SegmentModule, segments
from canvasrt.staging import staging

_GENERATION = {
    "max_denoising_steps": 48,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
    "eos_token_id": [1, 106, 50],
    "pad_token_id": 0,
    "bos_token_id": 2,
}

SHAPES: dict[str, dict[str, Any]] = {
    "released": TEXT_CONFIG,
    # The released shape with a small vocabulary. With few layers, the full vocabulary would take most of the time.
    "released-8k": TEXT_CONFIG | {"vocab_size": 8192},
    # The released head sizes, experts, vocabulary and proportions, in a checkpoint of 0.2 GB.
    "narrow": TEXT_CONFIG
    | {
        "hidden_size": 256,
        "intermediate_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "moe_intermediate_size": 64,
    },
    # About 300M parameters: the released proportions for a machine without a GPU.
    "300m": TEXT_CONFIG
    | {
        "vocab_size": 32_768,
        "hidden_size": 1024,
        "intermediate_size": 768,
        "num_hidden_layers": 9,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "global_head_dim": 256,
        "num_global_key_value_heads": 2,
        "num_experts": 32,
        "top_k_experts": 4,
        "moe_intermediate_size": 256,
    },
}

# `nvfp4`: as in the released NVFP4 checkpoint by ModelOpt: only experts are quantized, and each expert has its own
# tensors. `int4`: llm-compressor's W4A16 of every linear module in the layers, in groups of 64.
WEIGHT_FORMATS = ("bf16", "fp32", "nvfp4", "int4")
_BLOCK = 16
# E4M3 bits of block scales from 128 to 448.
_SCALE_BITS = np.arange(0x70, 0x7F, dtype=np.uint8)
_SCALES = np.concatenate([128 * (1 + np.arange(8) / 8), 256 * (1 + np.arange(7) / 8)])
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Root mean square of a random code times a random block scale, if the global scale is one.
_PACKED_RMS = math.sqrt(float((_E2M1**2).mean() * (_SCALES**2).mean()))
_GROUP = 64
_INT4_RMS = math.sqrt(float((np.arange(-8.0, 8.0) ** 2).mean()))
# Plausible results of a calibration: the largest input of an expert's first product, and of its second.
_INPUT_AMAX = {"gate_up_proj": 6.0, "down_proj": 10.0}


def write_random_checkpoint(
    out: Path | str,
    shape: str = "released",
    layers: int | None = None,
    seed: int = 0,
    format: str = "bf16",
) -> ModelConfig:
    """Write a random checkpoint to `out`, without a vision tower or tokenizer.

    Args:
        shape: a key of `SHAPES`. layers: the number of layers; None takes the shape's own. format: one of
        `WEIGHT_FORMATS`.

    Matrices have mean zero and variance 1 / inputs; norms and scalars are one, so that activations
    keep their size.
    """
    config = config_of(shape, layers, "float32" if format == "fp32" else "bfloat16")
    count = config["text_config"]["num_hidden_layers"]
    with staging(Path(out)) as tmp:
        if format == "nvfp4":
            config["quantization_config"] = _write_quant_config(tmp, count)
        elif format == "int4":
            config["quantization_config"] = _W4A16
        _dump(tmp / "config.json", config)
        _dump(tmp / "generation_config.json", _GENERATION)
        model, _ = read_config(config, _GENERATION)
        noise = _Noise(seed)
        parts = segments(model, layers_per_segment=1)
        index: dict[str, str] = {}
        for number, part in enumerate(parts, 1):
            file = f"model-{number:05}-of-{len(parts):05}.safetensors"
            tensors = dict(_tensors(part, model, noise, format))
            save_file(tensors, tmp / file, {"format": "pt"})
            index |= dict.fromkeys(tensors, file)
        _dump(tmp / INDEX, {"metadata": {}, "weight_map": index})
    return model


def config_of(shape: str, layers: int | None, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return the content of config.json."""
    text = dict(SHAPES[shape])
    text["num_hidden_layers"] = layers or text["num_hidden_layers"]
    text["layer_types"] = layer_types(text["num_hidden_layers"])
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "canvas_length": 256,
        "tie_word_embeddings": True,
        "dtype": dtype,
        "text_config": {"model_type": "diffusion_gemma_text", **text},
    }


def _write_quant_config(out: Path, layers: int) -> dict[str, Any]:
    """Write ModelOpt's hf_quant_config.json. Return the equivalent `quantization_config` for config.json."""
    kept = ["lm_head", "model.decoder.self_conditioning*"]
    for layer in range(layers):
        prefix = f"model.decoder.layers.{layer}"
        kept += [f"{prefix}.{name}*" for name in ("mlp", "router", "self_attn")]
    producer = {"name": "canvasrt", "version": canvasrt.__version__}
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": _BLOCK,
        "exclude_modules": kept,
    }
    _dump(out / "hf_quant_config.json", {"producer": producer, "quantization": quantization})
    number = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": _BLOCK}
    group = {"input_activations": number, "weights": number, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group},
        "ignore": kept,
        "quant_algo": "NVFP4",
        "producer": producer,
        "quant_method": "modelopt",
    }


# What llm-compressor writes into config.json for W4A16.
_W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "dynamic": False,
                "group_size": _GROUP,
                "num_bits": 4,
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "ignore": ["lm_head", "re:.*router.*", "re:.*self_conditioning.*"],
    "quantization_status": "compressed",
}


class _Noise:
    """Cheap random values, put together from pieces at random offsets of small pools of random numbers."""

    _POOL = 1 << 23
    _PIECE = 1 << 21

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._bytes = torch.from_numpy(self._random.integers(0, 256, self._POOL, np.uint8))
        self._scales = torch.from_numpy(self._random.choice(_SCALE_BITS, self._POOL))
        self._normal = torch.from_numpy(self._random.standard_normal(self._POOL, np.float32))

    def normal(self, shape: tuple[int, ...], std: float, dtype: torch.dtype) -> Tensor:
        return self._drawn(self._normal, shape, lambda each: (each * std).to(dtype))

    def near(self, shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
        """Return positive numbers, mostly within a fifth of `value`."""
        return self._drawn(self._normal, shape, lambda each: ((each * 0.1).exp() * value).to(dtype))

    def codes(self, *shape: int) -> Tensor:
        """Return bytes of packed codes."""
        return self._drawn(self._bytes, shape)

    def block_scales(self, *shape: int) -> Tensor:
        return self._drawn(self._scales, shape).view(torch.float8_e4m3fn)

    def around(self, value: float) -> float:
        """Return a number within a quarter of `value`."""
        return value * self._random.uniform(0.75, 1.25)

    def _drawn(
        self,
        pool: Tensor,
        shape: tuple[int, ...],
        change: Callable[[Tensor], Tensor] = lambda each: each,
    ) -> Tensor:
        left, pieces = math.prod(shape), []
        while left:
            size = min(left, self._PIECE)
            start = int(self._random.integers(0, self._POOL - size))
            pieces.append(change(pool[start : start + size]))
            left -= size
        return torch.cat(pieces).view(shape)


def _tensors(
    part: SegmentModule, model: ModelConfig, noise: _Noise, format: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint tensors from which a graph's weights are stacked."""
    dtype = torch.float32 if format == "fp32" else torch.bfloat16
    for name, parameter in part.module.named_parameters():
        sources = part.sources[name]
        experts = ".experts." in name
        if format == "nvfp4" and experts:
            yield from _packed(sources[0], tuple(parameter.shape), noise)
            continue
        if format == "int4" and experts:
            for module, rows, width in _modules(sources[0], tuple(parameter.shape)):
                yield from _int4(module, rows, width, noise)
            continue
        for source, rows in zip(sources, _rows(part, name, len(sources), model), strict=True):
            shape = (rows, *parameter.shape[1:])
            if format == "int4" and name.startswith("layers.") and _is_linear(name):
                yield from _int4(source.removesuffix(".weight"), rows, shape[-1], noise)
            elif parameter.dim() == 1:
                yield source, torch.ones(rows, dtype=dtype)
            else:
                yield source, noise.normal(shape, math.sqrt(1 / shape[-1]), dtype)


def _packed(source: str, shape: tuple[int, ...], noise: _Noise) -> Iterator[tuple[str, Tensor]]:
    """Yield a separate NVFP4 tensor for each expert of a layer, instead of the tensor `source` of `shape` `[E, out,
    in]`."""
    name, width = source.rpartition(".")[2], shape[2]
    input_scale, scale = noise.around(_INPUT_AMAX[name] / (6 * 448)), 1.0
    for module, rows, _ in _modules(source, shape):
        if not module.endswith("up_proj"):
            # Gate and up share a global scale, as ModelOpt writes them.
            scale = noise.around(math.sqrt(1 / width) / _PACKED_RMS)
        yield f"{module}.weight", noise.codes(rows, width // 2)
        yield f"{module}.weight_scale", noise.block_scales(rows, width // _BLOCK)
        yield f"{module}.weight_scale_2", torch.tensor(scale)
        yield f"{module}.input_scale", torch.tensor(input_scale)


def _modules(source: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    """Yield the name, outputs and inputs of every linear module of the experts in `source`."""
    experts, rows, width = shape
    prefix, _, name = source.rpartition(".")
    names = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    for expert in range(experts):
        for each in names:
            yield f"{prefix}.{expert}.{each}", rows // len(names), width


def _is_linear(name: str) -> bool:
    """Return whether llm-compressor packs a layer's weight: it packs weights of attention and of the shared MLP."""
    return name.endswith(("qkv.weight", "o.weight", "gate_up.weight", "down.weight"))


def _int4(module: str, rows: int, width: int, noise: _Noise) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a linear module in INT4."""
    std = noise.around(math.sqrt(1 / width) / _INT4_RMS)
    yield f"{module}.weight_packed", noise.codes(rows, width // 2).view(torch.int32)
    yield f"{module}.weight_scale", noise.near((rows, width // _GROUP), std, torch.bfloat16)
    yield f"{module}.weight_shape", torch.tensor([rows, width])


def _rows(part: SegmentModule, name: str, sources: int, model: ModelConfig) -> list[int]:
    """Return how many rows of a stacked weight come from each of its source tensors."""
    rows = part.module.get_parameter(name).shape[0]
    if name.endswith("qkv.weight"):
        (index,) = part.layers
        layer = model.layers[index]
        queries = model.num_attention_heads * layer.head_dim
        return [queries] + [layer.num_kv_heads * layer.head_dim] * (sources - 1)
    return [rows // sources] * sources


def _dump(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
