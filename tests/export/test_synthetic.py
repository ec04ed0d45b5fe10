"""Synthetic checkpoints have the shapes that they claim."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from canvasrt.export import synthetic
from canvasrt.export.segments import segments
from canvasrt.model import ModelConfig, read_config


def parameters(model: ModelConfig) -> int:
    return sum(p.numel() for part in segments(model) for p in part.module.parameters())


def test_the_reference_loads_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = synthetic.SHAPES["300m"] | {"vocab_size": 64, "hidden_size": 32, "num_experts": 4}
    monkeypatch.setitem(synthetic.SHAPES, "small", small)
    synthetic.write(tmp_path / "out", "small", layers=3)
    with torch.device("meta"):
        empty = DiffusionGemmaForBlockDiffusion(
            DiffusionGemmaConfig.from_pretrained(tmp_path / "out")
        )
    _, report = DiffusionGemmaForBlockDiffusion.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    # A checkpoint without a vision tower leaves the reference's at its random start.
    assert all("vision" in name for name in report["missing_keys"])
    assert empty.config.text_config.layer_types[-1] == "full_attention"


def test_the_released_shape_has_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """25.2B in all, of which the vision tower has about 0.55B and self-conditioning is part of the head."""
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
