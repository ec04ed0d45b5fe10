"""Synthetic checkpoints: their shapes, their layout, and the magnitude of their weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from bench import synthetic
from canvasrt.checkpoints.config import ModelConfig, read_config
from canvasrt.checkpoints.description import describe
from canvasrt.export.checkpoint import Checkpoint, Shard
from canvasrt.export.segments import segments
from canvasrt.graphs import lowbits
from tests.helpers.quantized_checkpoints import (
    NVFP4_EXPERTS,
    base_model,
    modelopt_quantized,
    save_compressed,
    save_modelopt,
)
from tests.helpers.random_models import BASE


def parameters(model: ModelConfig) -> int:
    return sum(p.numel() for part in segments(model) for p in part.module.parameters())


def test_the_reference_loads_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = synthetic.SHAPES["300m"] | {"vocab_size": 64, "hidden_size": 32, "num_experts": 4}
    monkeypatch.setitem(synthetic.SHAPES, "small", small)
    synthetic.write_random_checkpoint(tmp_path / "out", "small", layers=3)
    with torch.device("meta"):
        empty = DiffusionGemmaForBlockDiffusion(
            DiffusionGemmaConfig.from_pretrained(tmp_path / "out")
        )
    _, report = DiffusionGemmaForBlockDiffusion.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    # The checkpoint has no vision tower, so transformers initializes its own at random.
    assert all("vision" in name for name in report["missing_keys"])
    assert empty.config.text_config.layer_types[-1] == "full_attention"


def test_the_released_shape_has_its_parameters() -> None:
    """The model has 25.2B parameters, of which about 0.55B are the vision tower. Self-conditioning is in the head."""
    text = {"model_type": "diffusion_gemma_text", **synthetic.SHAPES["released"]}
    config = {"model_type": "diffusion_gemma", "canvas_length": 256, "text_config": text}
    model, _ = read_config(config, None)
    assert parameters(model) == pytest.approx(25.2e9, rel=0.01)
    experts = [
        p.numel()
        for part in segments(model)
        for name, p in part.module.named_parameters()
        if ".experts." in name
    ]
    assert sum(experts) == pytest.approx(22.8e9, rel=0.01)


def test_nvfp4_is_laid_out_as_modelopt_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares the names and shapes of all tensors, the dtypes of the experts' tensors, and the quantization keys."""
    save_modelopt(modelopt_quantized(NVFP4_EXPERTS), tmp_path / "theirs")
    monkeypatch.setitem(synthetic.SHAPES, "small", synthetic.SHAPES["released"] | BASE)
    synthetic.write_random_checkpoint(tmp_path / "ours", "small", layers=2, format="nvfp4")
    ours, theirs = (_layout(tmp_path / name) for name in ("ours", "theirs"))
    assert ours == {name: each for name, each in theirs.items() if "vision" not in name}
    for file in ("hf_quant_config.json", "config.json"):
        ours, theirs = (json.loads((tmp_path / n / file).read_text()) for n in ("ours", "theirs"))
        part = "quantization" if file.startswith("hf") else "quantization_config"
        assert set(ours[part]) <= set(theirs[part])
    how = describe(tmp_path / "ours").quantization
    assert how is not None
    assert (how.precision, how.algorithm, how.static) == ("nvfp4", "NVFP4", True)


def test_int4_is_laid_out_as_compressed_tensors_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_compressed(base_model(num_hidden_layers=2), tmp_path / "theirs", "W4A16", group_size=32)
    monkeypatch.setitem(synthetic.SHAPES, "small", synthetic.SHAPES["released"] | BASE)
    monkeypatch.setattr(synthetic, "_GROUP", 32)
    synthetic.write_random_checkpoint(tmp_path / "ours", "small", layers=2, format="int4")
    ours, theirs = (_layout(tmp_path / name) for name in ("ours", "theirs"))
    assert ours == {name: each for name, each in theirs.items() if "vision" not in name}
    how = describe(tmp_path / "ours").quantization
    assert how is not None
    assert (how.precision, how.static) == ("int4", True)
    # With a variance of 1 / inputs, weights keep the magnitude of activations.
    held = Checkpoint(tmp_path / "ours")
    name = "model.decoder.layers.0.experts.3.gate_proj"
    codes = held.read(f"{name}.weight_packed").view(torch.uint8).numpy() ^ lowbits.INT4_OFFSET
    wide = lowbits.dequantize(
        "int4", codes, blocks=held.read(f"{name}.weight_scale").float().numpy()
    )
    assert wide.std() * wide.shape[1] ** 0.5 == pytest.approx(1, rel=0.4)


def _layout(folder: Path) -> dict[str, tuple[torch.dtype | None, tuple[int, ...]]]:
    return {
        # ModelOpt leaves all other tensors in the model's dtype, so their dtype is not compared.
        name: (entry.dtype if ".experts." in name else None, entry.shape)
        for file in folder.glob("*.safetensors")
        for name, entry in Shard(file).tensors.items()
    }


def test_packed_experts_keep_the_size_of_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "small", synthetic.SHAPES["narrow"] | {"vocab_size": 64})
    synthetic.write_random_checkpoint(tmp_path / "out", "small", layers=1, format="nvfp4")
    held = Checkpoint(tmp_path / "out")
    module = "model.decoder.layers.0.experts.5.up_proj"
    codes, blocks, scale = (
        held.read(f"{module}.{kind}") for kind in ("weight", "weight_scale", "weight_scale_2")
    )
    weight = lowbits.dequantize("nvfp4", codes.numpy(), scale, blocks.view(torch.uint8).numpy())
    assert np.isfinite(weight).all()
    # The scales of experts differ by up to a quarter.
    assert 0.7 < weight.std() * 256**0.5 < 1.3


def test_the_narrow_shape_has_the_released_head_sizes() -> None:
    text = {"model_type": "diffusion_gemma_text", **synthetic.SHAPES["narrow"]}
    config = {"model_type": "diffusion_gemma", "canvas_length": 256, "text_config": text}
    model, _ = read_config(config, None)
    assert {layer.head_dim for layer in model.layers} == {256, 512}
    assert (model.num_experts, model.vocab_size, len(model.layers)) == (128, 262_144, 6)
    assert parameters(model) < 120e6


def test_the_same_seed_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "small", synthetic.SHAPES["released"] | BASE)
    for name in ("a", "b"):
        synthetic.write_random_checkpoint(
            tmp_path / name, "small", layers=1, seed=3, format="nvfp4"
        )
    first, second = (sorted((tmp_path / name).iterdir()) for name in ("a", "b"))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
