"""Streaming both sides of the quality report yields the same numbers, and never holds a whole model in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.synthetic import write_random_checkpoint
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.checkpoints.description import describe
from canvasrt.export.checkpoint import Checkpoint
from canvasrt.fidelity import measure_quality, report
from canvasrt.fidelity.observed_model import ObservedModel
from canvasrt.fidelity.reference import ReferenceModel
from canvasrt.fidelity.streamed import read_wide
from canvasrt.pipeline import build_bundle
from canvasrt.runtime.open import open_model
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, EncodeInput
from tests.helpers import library


@pytest.fixture
def int4() -> tuple[Path, Bundle]:
    """An INT4 checkpoint, and a bundle for a CPU with the same codes."""
    return library.checkpoint("as-int4"), load_bundle(library.bundle("as-int4"), check=False)


def logits(model: ReferenceModel, steps: int = 3) -> torch.Tensor:
    """Return the logits after a prompt and several consecutive steps."""
    config, rng = model.config, np.random.default_rng(0)
    row = model.new_row()
    model.encode([EncodeInput(row, rng.integers(6, config.vocab_size, 70))])
    shape = config.canvas_length
    hidden = model.first_hidden(rng.integers(0, config.vocab_size, shape))
    for _ in range(steps):
        noise = rng.random(shape).astype("f"), rng.integers(0, config.vocab_size, shape)
        (out,) = model.denoise([DenoiseInput(row, hidden, 0.7, 0.1, *noise)])
        hidden = out.next_hidden
    assert row.logits is not None
    return row.logits


def test_a_streamed_reference_computes_the_same(tiny: Any) -> None:
    whole, streamed = (
        ReferenceModel(describe(tiny.checkpoint)),
        ReferenceModel(describe(tiny.checkpoint), True),
    )
    # On some CPUs, a product's last bits depend on the weight's alignment. Weights mapped from a file are aligned
    # differently, so they are copied.
    for parameter in whole.module.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(logits(whole), logits(streamed))
    held = [name for name, each in streamed.module.named_parameters() if each.device.type == "cpu"]
    assert held
    # After a pass, no weights of layers are in memory.
    assert not any(".layers." in name for name in held)


def edited(checkpoint: Path, to: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """Copy a checkpoint and change its tensors."""
    shutil.copytree(checkpoint, to)
    tensors = load_file(to / "model.safetensors")
    changed = {name: change(name, each) for name, each in tensors.items()}
    save_file(changed, to / "model.safetensors", {"format": "pt"})
    return to


def test_a_quantized_checkpoint_stands_for_what_compressed_tensors_unpacks(
    int4: Any, tmp_path: Path
) -> None:
    """The weights read equal those of compressed-tensors, with the checkpoint's exact scales, which graphs round to
    bfloat16."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    def finer(name: str, each: torch.Tensor) -> torch.Tensor:
        return (1.001 * each).to(torch.float16) if name.endswith("weight_scale") else each

    folder = edited(int4[0], tmp_path / "finer", finer)
    tensors = load_file(folder / "model.safetensors")
    module = "model.decoder.layers.1.experts.3.down_proj"
    codes = unpack_from_int32(
        tensors[f"{module}.weight_packed"], 4, tensors[f"{module}.weight_shape"]
    )
    expected = codes * tensors[f"{module}.weight_scale"].float().repeat_interleave(32, 1)
    found = torch.empty(8, *codes.shape)
    read_wide(Checkpoint(folder), "model.decoder.layers.1.experts.down_proj", found)
    assert torch.equal(found[3], expected)


def test_one_segment_at_a_time_computes_the_same(tiny: Any) -> None:
    bundle = load_bundle(tiny.bundle)
    sides = [ObservedModel(bundle, streamed) for streamed in (False, True)]
    found = []
    for side in sides:
        row: Any = side.model.new_row()
        rng = np.random.default_rng(1)
        config = side.model.config
        side.model.encode([EncodeInput(row, rng.integers(6, config.vocab_size, 9))])
        shape = config.canvas_length
        hidden = side.model.first_hidden(rng.integers(0, config.vocab_size, shape))
        noise = rng.random(shape).astype("f"), rng.integers(0, config.vocab_size, shape)
        with side.watching() as head:
            (out,) = side.model.denoise([DenoiseInput(row, hidden, 0.7, 0.1, *noise)])
        assert head is not None
        found.append((out.next_hidden, head.logits))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    backend = sides[1].backend
    assert backend is not None
    opened = [each for each in backend.segments.values() if getattr(each, "_opened", None)]
    # Only the segment that ran last may be open. This is the head, which is inside a wrapper.
    assert opened == []
    assert backend.segments["head"]._segment._opened is not None


def test_a_bundle_agrees_with_its_int4_checkpoint(int4: Any) -> None:
    """The bundle has the checkpoint's codes. Only the table differs, and the experts' inputs, which are rounded to
    int8."""
    folder, bundle = int4
    found = measure_quality(bundle, describe(folder), 25)
    assert found["answers"] is found["pace"] is None
    assert found["steps"]["prompts"] == 2
    assert len(found["steps"]["by_step"]) == 3
    errors = {each["name"]: each["error"] for each in found["weights"]}
    assert len(errors) > 12
    assert 0 < errors.pop("table") < 0.01
    assert all(error < 1e-6 for error in errors.values()), errors
    assert all(each["gate_up"] == each["down"] == 0 for each in found["experts"])
    assert found["ok"], found["limits"]


@pytest.mark.acceptance
def test_four_requests_of_the_released_widths_agree_with_transformers(tmp_path: Path) -> None:
    """transformers multiplies the same INT4 codes in fp32. The test would fail if a request read another request's
    cache."""
    folder = tmp_path / "checkpoint"
    config = write_random_checkpoint(folder, "released-8k", layers=1, format="int4")
    bundle = build_bundle(folder, "cpu", tmp_path / "bundle")
    sides: list[Any] = [ReferenceModel(describe(folder), True), open_model(bundle.path)]
    found: list[list[DenoiseOutput]] = []
    for side in sides:
        rng = np.random.default_rng(0)
        tokens = [rng.integers(6, config.vocab_size, count) for count in (1, 7, 30, 90)]
        rows = [side.new_row() for _ in tokens]
        side.encode([EncodeInput(*each) for each in zip(rows, tokens, strict=True)])
        length = config.canvas_length
        hidden = [side.first_hidden(rng.integers(0, config.vocab_size, length)) for _ in rows]
        for _ in range(2):
            # With a bound below zero, no token is accepted, so both sides get the same canvas.
            noise = [(rng.random(length).astype("f"), rng.integers(0, 8192, length)) for _ in rows]
            given = zip(rows, hidden, noise, strict=True)
            outs = side.denoise([DenoiseInput(r, h, np.float32(2), -1.0, *n) for r, h, n in given])
            hidden = [each.next_hidden for each in outs]
        found.append(outs)
    for expected, ours in zip(*found, strict=True):
        assert np.mean(expected.argmax == ours.argmax) > 0.98
        error = np.abs(expected.entropy - ours.entropy)
        assert error.mean() < 0.02 * expected.entropy.mean()


def test_the_checkpoint_s_own_codes_must_be_the_same(int4: Any, tmp_path: Path) -> None:
    """A matrix that canvasrt quantized may differ by a tenth; a matrix with the checkpoint's codes may not differ."""
    checkpoint, bundle = int4
    name = "model.decoder.layers.1.experts.3.down_proj.weight_scale"

    def wrong(tensor: str, each: torch.Tensor) -> torch.Tensor:
        return 1.1 * each if tensor == name else each

    def check(folder: Path) -> tuple[float, bool, str | None]:
        found = measure_quality(bundle, describe(folder), 0)
        (kept,) = [each for each in found["limits"] if each["name"] == "weight_error_kept"]
        return kept["measured"], kept["ok"], kept["where"]

    assert check(checkpoint) == (0, True, None)
    measured, ok, where = check(edited(checkpoint, tmp_path / "wrong", wrong))
    assert 0.08 < measured < 0.1
    assert (ok, where) == (False, "layers.1.experts.down, expert 3")


def test_a_large_model_is_streamed(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = describe(tiny.checkpoint)
    assert not report.is_streamed(checkpoint)
    monkeypatch.setattr(report, "available_bytes", lambda: 10**6)
    assert report.is_streamed(checkpoint)
    whole = measure_quality(load_bundle(tiny.bundle), describe(tiny.checkpoint), 0)
    assert whole["ok"]
    assert whole["steps"]["prompts"] == 2
