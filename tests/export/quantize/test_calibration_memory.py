"""Calibration holds only one layer's weights in memory, and frees the memory of a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.synthetic import SHAPES, write_random_checkpoint
from canvasrt.bundle import Bundle
from canvasrt.calibration_prompts import CalibrationPrompts
from canvasrt.errors import CanvasError
from canvasrt.export.quantize import observed_part
from canvasrt.export.quantize.network import StreamedNetwork
from canvasrt.recipes.recipe import CalibrationSettings, load_recipe
from tests.helpers.quantized import calibrate

GROWTH = """
import sys
from pathlib import Path
import torch
from canvasrt.calibration_prompts import CalibrationPrompts
from canvasrt.checkpoints.description import describe
from canvasrt.export.checkpoint import Checkpoint
from canvasrt.export.quantize.calibrate import calibrate
from canvasrt.export.quantize.stored_weights import CheckpointWeights
from canvasrt.export.quantize import network
from canvasrt.recipes.recipe import load_recipe

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10

folder, file, room = map(Path, sys.argv[1:])
recipe, found = load_recipe("nvfp4"), describe(folder)
model, sampler = found.model, found.sampler
before = peak()
weights = CheckpointWeights(Checkpoint(folder), model, sampler, torch.bfloat16, {})
calibrate(weights, recipe, CalibrationPrompts.of(file, recipe, model, sampler, {}, {}), room)
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights take 240 MB, or 480 MB in float32; a layer takes 30 MB. Most of the growth is activations."""
    shape = SHAPES["300m"] | {"vocab_size": 1024, "hidden_size": 512, "num_attention_heads": 4}
    monkeypatch.setitem(SHAPES, "deep", shape)
    write_random_checkpoint(tmp_path / "deep", "deep", layers=8)
    config = tmp_path / "deep" / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_denoising_steps": 2}))
    assert sum(each.stat().st_size for each in (tmp_path / "deep").iterdir()) > 240e6
    (tmp_path / "prompts.jsonl").write_text('{"prompt_ids": [5, 6, 7]}\n' * 3)
    command = [
        sys.executable,
        "-c",
        GROWTH,
        tmp_path / "deep",
        tmp_path / "prompts.jsonl",
        tmp_path,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 200e6


def test_weights_are_read_and_keys_attended_to_as_often_as_planned(
    plain_graphs: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 150 tokens takes one more sweep than passes, because it is read in two chunks, the first of 128
    tokens."""
    settings = CalibrationSettings(1, max_new_tokens=40, all_steps=1.0)
    recipe, file = replace(load_recipe("nvfp4"), calibration=settings), tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt_ids": [5] * 150}))
    sweep, ran = StreamedNetwork._sweep, []
    monkeypatch.setattr(StreamedNetwork, "_sweep", lambda *each: ran.append(each) or sweep(*each))
    made, pairs = observed_part.attention_mask, Counter[str]()

    def mask(positions: Any, groups: Any, causal: Any, known: Any, window: Any, dtype: Any) -> Any:
        keys = int((known >= 0).sum()) + positions.numel()
        pairs["sliding" if window else "full"] += positions.numel() * keys
        return made(positions, groups, causal, known, window, dtype)

    monkeypatch.setattr(observed_part, "attention_mask", mask)
    calibrate(plain_graphs, recipe, file)
    about = plain_graphs.manifest
    planned = CalibrationPrompts.of(file, recipe, about.model, about.sampler, {}, {}).work
    assert len(ran) == planned.sweeps == planned.passes + 1
    layers = Counter(each.kind for each in about.model.layers)
    assert pairs == {kind: layers[kind] * count for kind, count in planned.attended.items()}


def test_memory_of_a_gpu_is_given_back(
    plain_graphs: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is freed even after it ran out. The error's hint then says what to do."""
    recipe = replace(load_recipe("nvfp4"), calibration=CalibrationSettings(1, max_new_tokens=8))
    (tmp_path / "prompts.jsonl").write_text('{"prompt_ids": [5, 6, 7]}\n')
    run = partial(calibrate, plain_graphs, recipe, tmp_path / "prompts.jsonl")
    begin, alive, given = StreamedNetwork.__init__, [], []

    def counted(self: StreamedNetwork, *rest: Any) -> None:
        begin(self, *rest)
        alive.append(weakref.ref(self))

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(StreamedNetwork, "__init__", counted)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(alive[-1]()))
    run()
    assert given == [None]
    monkeypatch.setattr(StreamedNetwork, "_sweep", full)
    with pytest.raises(CanvasError, match=r"GPU memory: CUDA .* allocate 2\.00 GiB$") as raised:
        run()
    assert "CUDA_VISIBLE_DEVICES" in raised.value.hint
    assert len(given) == 2
