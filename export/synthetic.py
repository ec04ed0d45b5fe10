"""Random checkpoints of real shapes, for sizes and speeds that do not depend on trained weights.

`python -m canvasrt.export.synthetic --shape 300m -o DIR` writes one in the Hugging Face layout, a layer in memory at a
time.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from canvasrt.bundle import staging
from canvasrt.export.checkpoint import INDEX
from canvasrt.export.segments import Segment, segments
from canvasrt.model import ModelConfig

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

# The text backbone of google/diffusiongemma-26B-A4B-it.
_RELEASED: dict[str, Any] = {
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

SHAPES: dict[str, dict[str, Any]] = {
    "released": _RELEASED,
    # About 300M parameters: the released proportions on a machine without a GPU.
    "300m": _RELEASED
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


def write(
    out: Path | str,
    shape: str = "released",
    layers: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> ModelConfig:
    """Write a random checkpoint to `out`, without a vision tower and without a tokenizer.

    Args: `shape` a key of `SHAPES`; `layers` how many, the shape's own number when None; `dtype` of the weights.
    Matrices are normal with variance 1 / inputs, norms and scalars one, so that activations keep their size.
    """
    text = dict(SHAPES[shape])
    text["num_hidden_layers"] = layers or text["num_hidden_layers"]
    count = text["num_hidden_layers"]
    # The reference forces the last layer to full attention.
    text["layer_types"] = [
        "full_attention" if (i + 1) % 6 == 0 or i + 1 == count else "sliding_attention"
        for i in range(count)
    ]
    config = {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "canvas_length": 256,
        "tie_word_embeddings": True,
        "dtype": str(dtype).removeprefix("torch."),
        "text_config": {"model_type": "diffusion_gemma_text", **text},
    }
    with staging(Path(out)) as tmp:
        _dump(tmp / "config.json", config)
        _dump(tmp / "generation_config.json", _GENERATION)
        model, _ = ModelConfig.from_checkpoint(tmp)
        _write_weights(tmp, model, torch.Generator().manual_seed(seed), dtype)
    return model


def _write_weights(
    out: Path, model: ModelConfig, generator: torch.Generator, dtype: torch.dtype
) -> None:
    parts = segments(model, layers_per_segment=1)
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        tensors = dict(_tensors(part, model, generator, dtype))
        save_file(tensors, out / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    _dump(out / INDEX, {"metadata": {}, "weight_map": index})


def _tensors(
    part: Segment, model: ModelConfig, generator: torch.Generator, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint tensors that a graph's weights are stacked from."""
    for name, parameter in part.module.named_parameters():
        sources = part.sources[name]
        for source, rows in zip(sources, _rows(part, name, len(sources), model), strict=True):
            shape = (rows, *parameter.shape[1:])
            if parameter.dim() == 1:
                yield source, torch.ones(shape, dtype=dtype)
            else:
                values = torch.empty(shape, dtype=dtype)
                yield source, values.normal_(0, math.sqrt(1 / shape[-1]), generator=generator)


def _rows(part: Segment, name: str, sources: int, model: ModelConfig) -> list[int]:
    """How many rows of a stacked weight each of its sources gives."""
    rows = part.module.get_parameter(name).shape[0]
    if name.endswith("qkv.weight"):
        (index,) = part.layers
        layer = model.layers[index]
        queries = model.num_attention_heads * layer.head_dim
        return [queries] + [layer.num_kv_heads * layer.head_dim] * (sources - 1)
    return [rows // sources] * sources


def _dump(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Write the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("-o", "--output", required=True, help="folder to write")
    parser.add_argument("--shape", choices=SHAPES, default="300m", help="default: 300m")
    parser.add_argument("--layers", type=int, help="default: the shape's own number")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.output, args.shape, args.layers, args.seed)


if __name__ == "__main__":
    main()
