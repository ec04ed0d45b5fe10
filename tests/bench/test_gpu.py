"""The GPU benchmark on a fake GPU: passes of a reduced shape, checked against transformers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import floor, gpu, probe, shape, synthetic
from bench.__main__ import main
from bench.runner import DeviceRunner
from bench.transformers_side import repeated_model
from canvasrt.errors import UsageError
from canvasrt.export.quantize.quantize import read_calibration
from canvasrt.machine import Gpu, gpus
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseInput, EncodeInput
from canvasrt.types import Json
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.sorted_bundles import build_sorted, sorted_backend

pytestmark = pytest.mark.acceptance

# One sliding and one full layer, a few experts, and the released canvas.
WIDTHS: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "sliding_window": 128,
    "num_experts": 16,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 65_536,
}
SMALL = shape.Shape("small", 2, 2, "fp32")
SWEEP = gpu.Sweep((1, 2), (64,), 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def prepared(folder: Path) -> Iterator[shape.Prepared]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synthetic.SHAPES, "small", synthetic.SHAPES["released"] | WIDTHS)
        yield shape.prepare(SMALL, folder)


def test_the_measurement_says_what_it_left_out(
    prepared: shape.Prepared, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a side or one of its passes fails, the others are still measured. Rows are saved as they are measured."""
    monkeypatch.setattr(gpu, "_provider", lambda max_batch: FakeBackend())
    one = DeviceRunner.pass_ms

    def pass_ms(self: DeviceRunner, batch: int, *given: Any) -> list[float]:
        if batch == 2:
            raise OSError("out of memory\nand more")
        return one(self, batch, *given)

    monkeypatch.setattr(DeviceRunner, "pass_ms", pass_ms)
    saved: list[int] = []

    def save(figures: Json) -> None:
        saved.append(len(figures["passes, ms"]))

    figures = gpu.run(SMALL, SWEEP, folder, gpu.SIDES, "fp8", save)
    passes = figures["passes, ms"]
    assert [(row["side"], row["batch"]) for row in passes] == [
        *(("onnxruntime", 1), ("transformers", 1), ("transformers", 2))
    ]
    assert all(row["min"] <= row["even"] <= row["max"] for row in passes)
    # transformers draws the canvases itself, so it is measured with even routing only.
    assert [row["side"] for row in passes if "padded" in row] == ["onnxruntime"]
    assert figures["engines"]["precision"] == "fp8"
    left_out = {row["side"]: row["skipped"] for row in figures["not measured"]}
    assert left_out["onnxruntime"] == "OSError: out of memory"
    assert "CanvasError: this machine has no GPU" in left_out["tensorrt"]
    assert "no GPU" in figures["rates"]["skipped"]
    assert saved[0] == 1


@pytest.mark.skipif(bool(gpus()), reason="this machine has a GPU")
def test_each_try_of_the_probe_is_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    assert main(["probe", "--modules", "provider,engines,sorted", "-o", str(out)]) == 1
    rows = json.loads(out.read_text())["figures"]["outcomes"]
    found = {row["tried"]: row["generate"] for row in rows}
    assert "CUDA provider" in found["provider"]
    assert "no target" in found["engines"]
    assert "no target" in found["sorted"]


def test_the_probe_times_a_context_that_returns_to_a_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    model = SimpleNamespace(
        new_row=object,
        release=lambda row: None,
        encode=lambda inputs: lengths.append(len(inputs[0].tokens)),
    )
    monkeypatch.setattr(probe, "gpus", lambda: (Gpu("an H100", 80 << 30, (9, 0), "580.95"),))
    monkeypatch.setattr(probe, "_generated", lambda *given: probe.RAN)
    monkeypatch.setattr(
        "canvasrt.pipeline.build_bundle", lambda *given: SimpleNamespace(path=tmp_path)
    )
    monkeypatch.setattr("canvasrt.runtime.open.open_model", lambda *given, **named: model)
    said = probe._engines(tmp_path)
    assert [int(each) for each in re.findall(r"(\d+): [\d.]+(?:,|$)", said)] == lengths
    assert lengths[:2] == [64, 64]
    assert lengths[2] != lengths[3] == 64


def test_a_probe_that_is_cut_keeps_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(name: str, folder: str) -> str:
        if name == "sorted":
            raise KeyboardInterrupt
        return f"{probe.RAN} here"

    monkeypatch.setattr(probe, "_in_a_process", tried)
    out = tmp_path / "probe.json"
    with pytest.raises(KeyboardInterrupt):
        probe.measure("engines,sorted", out=out)
    rows = json.loads(out.read_text())["figures"]["outcomes"]
    assert rows == [{"tried": "engines", "generate": "it ran here"}]
    with pytest.raises(UsageError, match="names demo, which is unknown"):
        probe.measure("demo")


def test_sides_that_cannot_run_are_refused_before_gigabytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["gpu", "--sides", "tensorrt", "--work", str(tmp_path / "work")]
    if not gpus():
        assert main(line) == 1
        assert "this machine has no GPU" in capsys.readouterr().err
    here = Gpu("NVIDIA H100 80GB HBM3", 80 << 30, (9, 0), "580.95")
    monkeypatch.setattr(gpu, "gpus", lambda: (here,))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert main(line) == 1
    assert "tensorrt is not installed" in capsys.readouterr().err
    assert main(["gpu", "--sides", "vllm"]) == 1
    assert "unknown side 'vllm'" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_engines_over_sorted_rows_are_measured(prepared: shape.Prepared, tmp_path: Path) -> None:
    """The engines run on a fake TensorRT, and canvasrt's kernels in Triton's interpreter."""
    bundle = build_sorted(prepared.graphs.path, tmp_path / "engines")
    backend, device = sorted_backend(bundle)
    runner = DeviceRunner(prepared, backend, SWEEP.max_context, bundle)
    assert len(runner.pass_ms(1, 64, 1)) == 1
    assert device.kernels_run
    assert runner.memory() > 0


def test_our_side_computes_what_transformers_computes(prepared: shape.Prepared) -> None:
    """Both sides have the same weights, including the repeated layers."""
    import torch
    from transformers import DynamicCache

    model = repeated_model(prepared, torch, "cpu")
    ours = DeviceRunner(prepared, FakeBackend(), SWEEP.max_context).model
    config = prepared.config
    prompt = np.random.default_rng(0).integers(3, config.vocab_size, 50)
    canvas = step_noise(0, 0, 0, config.canvas_length, config.vocab_size)[1]
    row = ours.new_row()
    ours.encode([EncodeInput(row, prompt)])
    noise = step_noise(0, 0, 1, config.canvas_length, config.vocab_size)
    given = DenoiseInput(row, ours.first_hidden(canvas), np.float32(1), 0.1, *noise)
    (out,) = ours.denoise([given])
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        model.model.encoder(input_ids=torch.from_numpy(prompt)[None], past_key_values=cache)
        positions = torch.arange(50, 50 + config.canvas_length)[None]
        logits = model(
            decoder_input_ids=torch.from_numpy(canvas)[None],
            past_key_values=cache,
            decoder_position_ids=positions,
        ).logits
    assert len(cache.layers) == len(config.layers) == 4
    entropy = torch.distributions.Categorical(logits=logits[0]).entropy().numpy()
    assert (logits[0].argmax(-1).numpy() == out.argmax).mean() > 0.99
    assert np.abs(entropy - out.entropy).max() < 1e-3


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_engines_may_be_quantized(precision: str, prepared: shape.Prepared, folder: Path) -> None:
    """Engines are quantized by one of canvasrt's recipes. The bundle records that its calibration is made up."""
    served = shape.quantized(prepared, precision, folder)
    assert served.config == prepared.config
    assert served.weight_bytes < prepared.weight_bytes
    manifest = served.graphs.manifest
    assert manifest.options["precision"] == precision
    assert manifest.made_from["calibration"] == "made up"
    calibration = read_calibration(served.graphs)
    assert set(calibration["amax"].values()) == {shape.MADE_UP_AMAX}
    assert calibration["prompts"] == 0
    assert shape.quantized(prepared, precision, folder).graphs.path == served.graphs.path


def test_the_floor_is_the_slower_of_reading_and_computing(prepared: shape.Prepared) -> None:
    measured = {"copy_bytes_per_second": 1e9, "matrix_operations_per_second": 1e12}
    one, eight = (floor.floor_ms(prepared, measured, batch) for batch in (1, 8))
    assert one["reading"] == eight["reading"] == prepared.weight_bytes / 1e6
    assert eight["computing"] == 8 * one["computing"]
    assert eight["floor"] == max(eight["reading"], eight["computing"])
    del measured["matrix_operations_per_second"]
    alone = floor.floor_ms(prepared, measured, 8)
    assert alone["floor"] == alone["reading"] == one["reading"]
