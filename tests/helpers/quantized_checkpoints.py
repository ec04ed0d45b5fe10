"""Quantized checkpoints of a small model, written by the tools that users use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.helpers.random_models import random_model

SMALL = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
NVFP4_EXPERTS = "huggingface/diffusion_gemma/ptq/nvfp4_experts_only"


def base_model(**changes: Any) -> Any:
    """Return a model whose float32 weights are exact in bfloat16."""
    model = random_model({**SMALL, **changes})
    stored = [*model.parameters(), *(b for n, b in model.named_buffers() if "layer_scalar" in n)]
    for tensor in stored:
        tensor.data = tensor.data.to(torch.bfloat16).to(torch.float32)
    model.config.architectures = [type(model).__name__]
    return model


def modelopt_quantized(recipe: str, **changes: Any) -> Any:
    """Return a model with ModelOpt's fake quantization, by a recipe of ModelOpt or by `FP8`."""
    import modelopt.torch.quantization as mtq
    from modelopt.recipe import load_recipe

    config = mtq.FP8_DEFAULT_CFG if recipe == "FP8" else load_recipe(recipe).quantize.model_dump()
    model = base_model(**changes)
    torch.manual_seed(0)  # the model draws its canvas
    return mtq.quantize(model, config, lambda each: [each(input_ids=ids) for ids in _prompts()])


def save_modelopt(model: Any, folder: Path) -> None:
    """Pack and write the model, without the vision tower, which graphs do not need."""
    from modelopt.torch.export import export_hf_checkpoint

    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=folder, dtype=torch.bfloat16)
    without_vision(folder)


def without_vision(folder: Path) -> None:
    """Remove the vision tower from a checkpoint's configuration, since tracing it takes time."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("vision_config", None)
    file.write_text(json.dumps(config))


def save_compressed(
    model: Any, folder: Path, preset: str = "FP8_DYNAMIC", group_size: int | None = None
) -> None:
    """Write a checkpoint like llm-compressor's: experts are linear modules, quantized by a preset of compressed-tensors
    and packed by it."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, is_module_quantized
    from safetensors.torch import save_file

    config = model.config
    model = model.to(torch.bfloat16)
    for layer in model.model.decoder.layers:
        layer.experts = _linear_experts(layer.experts)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if group_size is not None:
        scheme.weights.group_size = group_size
    ignored = ["lm_head", "re:.*router.*", "re:.*vision.*", "re:.*encoder.*", "re:.*self_cond.*"]
    settings = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=ignored,
        format="pack-quantized" if preset.startswith("W4") else "float-quantized",
    )
    apply_quantization_config(model, settings)
    for module in model.modules():
        if is_module_quantized(module):
            weight = module.weight.detach()
            groups = weight.unflatten(1, (-1, group_size or weight.shape[1]))
            scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
            module.weight_scale.data = scale.to(module.weight_scale.dtype)
            if not scheme.weights.symmetric:
                module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
    compressor = ModelCompressor(quantization_config=settings)
    compressor.compress_model(model)
    folder.mkdir()
    config.save_pretrained(folder)
    save_file(_state(model), folder / "model.safetensors", {"format": "pt"})
    compressor.update_config(folder)
    without_vision(folder)


FORMS: dict[str, Callable[[Path], None]] = {
    "plain": lambda folder: random_model(SMALL).save_pretrained(folder),
    "nvfp4": lambda folder: save_modelopt(modelopt_quantized(NVFP4_EXPERTS), folder),
    "fp8": lambda folder: save_modelopt(modelopt_quantized("FP8"), folder),
    "dynamic": lambda folder: save_compressed(base_model(), folder),
    "int4": lambda folder: save_compressed(base_model(), folder, "W4A16", group_size=32),
}


def _linear_experts(experts: Any) -> nn.Module:
    split = nn.Module()
    width = experts.down_proj.shape[2]
    for index in range(len(experts.down_proj)):
        first, down = experts.gate_up_proj[index], experts.down_proj[index]
        expert = nn.Module()
        for name, weight in (
            ("gate_proj", first[:width]),
            ("up_proj", first[width:]),
            ("down_proj", down),
        ):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
            linear.weight.data = weight.detach().clone()
            expert.add_module(name, linear)
        split.add_module(str(index), expert)
    return split


def _state(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint. Tied tensors are stored once, with the decoder's name."""
    text = "model.encoder.language_model."
    return {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" and (not name.startswith(text) or name.endswith("layer_scalar"))
    }


def _prompts() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        yield torch.randint(6, 512, (2, 24), generator=generator)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a checkpoint that is one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
