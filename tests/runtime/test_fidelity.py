"""`canvasrt verify --reference`: a bundle agrees with its own checkpoint, and with no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from canvasrt import fidelity
from canvasrt.cli.app import run
from canvasrt.errors import CanvasError


def test_a_bundle_agrees_with_its_checkpoint(tiny: Any, capsys: Any) -> None:
    assert run(["verify", str(tiny.bundle), "--reference", str(tiny.checkpoint), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["fidelity"]
    assert result["positions"] == 4 * 12 * 32
    assert result["argmax_agreement"] == 1
    assert result["entropy_error_max"] < 1e-3


def test_it_does_not_agree_with_a_checkpoint_that_was_edited(
    tiny: Any, tmp_path: Path, capsys: Any
) -> None:
    edited = shutil.copytree(tiny.checkpoint, tmp_path / "edited")
    tensors = load_file(edited / "model.safetensors")
    tensors["model.decoder.layers.3.layer_scalar"] *= 1.05
    save_file(tensors, edited / "model.safetensors", {"format": "pt"})
    assert run(["verify", str(tiny.bundle), "--reference", str(edited)]) == 1
    assert "does not compute what" in capsys.readouterr().err


def test_a_checkpoint_of_another_shape_is_refused(tiny: Any) -> None:
    from canvasrt.demo import CHECKPOINT

    with pytest.raises(CanvasError, match="of different shapes"):
        fidelity.measure(tiny.bundle, CHECKPOINT)
