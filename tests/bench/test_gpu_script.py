"""The GPU benchmark, run on a CPU: every measurement at a reduced shape, with our side checked
against transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import experts, floor, measure, shape
from bench.reference import repeated_model
from bench.report import markdown
from bench.runner import ROUTINGS, DeviceRunner, HostRunner
from canvasrt.export.quantize.quantize import read_calibration
from canvasrt.machine import gpus
from canvasrt.runtime.backends.onnxruntime import OrtBackend
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseInput, EncodeInput
from tests.helpers.fake_engine import FakeBackend

ROOT = Path(__file__).parents[2]
QUICK = replace(shape.SMALL, contexts=(64,), repeats=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def prepared(folder: Path) -> shape.Prepared:
    return shape.prepare(QUICK, folder)


def script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_script_runs_and_says_what_it_left_out(
    prepared: shape.Prepared, folder: Path, tmp_path: Path
) -> None:
    done = script(
        "--small", "--contexts", 64, "--repeats", 1, "--work", folder, "-o", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "out" / "gpu.json").read_text())
    for name in ("onnxruntime", "transformers"):
        side = data["sides"][name]
        assert [run["batch"] for run in side["passes"]] == [1, 2]
        assert all(run["min"] <= run["ms"] <= run["max"] for run in side["passes"]), side
        for run in side["generation"]:
            assert run["tokens_per_second"] > 0
            assert run["first_tokens_ms"] > 0
        assert len(side["expert_loads"]["even"]) == 4
    # transformers draws its own canvases.
    assert not side["expert_loads"]["padded"]
    assert not side["expert_loads"]["skewed"]
    ours = data["sides"]["onnxruntime"]
    assert all(run["padded_ms"] > 0 and run["skewed_ms"] > 0 for run in ours["passes"])
    # Equal tokens go to the same experts.
    even, skewed, padded = (sum(ours["expert_loads"][each]) for each in ROUTINGS)
    assert even < skewed < padded
    assert padded > 1.5 * even
    (parts,) = [run["parts"] for run in data["sides"]["onnxruntime"]["segments"]]
    assert list(parts) == ["body_0", "body_1", "head"]
    assert set(data["experts"]["onnxruntime"]["256"]) == {"32", "48", "64", "128", "160", "dense"}
    assert data["versions"]["onnxruntime"]
    assert "skipped" in data["sides"]["tensorrt"]
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert "| 64 | 2 |" in text
    assert "half padding" in text
    assert "| side | tokens | 32 | 48 | 64 | 128 | 160 | 256 | dense |" in text
    assert " (skewed), " in text
    assert "- tensorrt: CanvasError: TensorRT needs a GPU, and this machine has none" in text


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU")
def test_the_probe_says_what_each_tool_said(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")
    command = [sys.executable, "-m", "bench.probe", "--modules", "tensorrt_rtx", "-o", tmp_path]
    command += ["--capabilities", "SM120,CURRENT,gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "probe.json").read_text())["outcomes"]
    assert "bytes" in found["tensorrt_rtx, SM120"]["build"]
    assert "no GPU can be used" in found["tensorrt_rtx, SM120"]["load and run"]
    assert "CUDA driver" in found["tensorrt_rtx, CURRENT"]["build"]
    assert "this machine has no GPU" in found["tensorrt_rtx, gpu"]["build"]
    assert "CUDA provider" in found["onnxruntime, CUDA"]["generate"]
    assert "no target" in found["engines of the demo"]["generate"]


def test_a_side_that_is_none_is_refused(tmp_path: Path) -> None:
    done = script("--small", "--sides", "vllm", "-o", tmp_path / "out")
    assert done.returncode == 1
    assert "unknown side 'vllm'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_device_s_side_is_measured_alike(prepared: shape.Prepared) -> None:
    """Measure a fake device, which looks like a GPU to the script."""
    device = DeviceRunner("fake", prepared, FakeBackend())
    host = HostRunner(prepared, OrtBackend(1))
    found = measure.side(device, QUICK)
    assert all("ms" in run for run in found["passes"])
    (parts,) = [run["parts"] for run in found["segments"]]
    assert list(parts) == ["body_0", "body_1", "head"]
    assert all(ms > 0 for ms in parts.values())
    assert [len(loads) for loads in found["expert_loads"].values()] == [4, 4, 4]
    run = device.generate(2, 40, 2, 3)
    assert run.tokens == host.generate(2, 40, 2, 3).tokens == 2 * 2 * 256
    assert len(run.step_seconds) == 6


def test_our_side_computes_what_transformers_computes(prepared: shape.Prepared) -> None:
    """Both sides have the same weights, repeated layers included."""
    import torch
    from transformers import DynamicCache

    model = repeated_model(prepared, torch, "cpu")
    ours = HostRunner(prepared, OrtBackend(1)).model
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


@pytest.mark.parametrize("precision", shape.QUANTIZED)
def test_engines_may_be_quantized(precision: str, prepared: shape.Prepared, folder: Path) -> None:
    """Quantize by one of our recipes. The bundle itself says that its calibration is made up."""
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


def test_a_report_names_the_engines_precision(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ("--precision", "fp8", "--sides", "onnxruntime-graphs,tensorrt")
    done = script("--small", "--contexts", 64, "--work", folder, "-o", out, *asked)
    assert done.returncode == 0, done.stderr
    text = (out / "gpu.md").read_text()
    assert "Only the side tensorrt and the floor: fp8" in text
    assert "a made-up calibration: no prompt was run" in text
    assert "- onnxruntime-graphs: CanvasError: CUDA graphs need a GPU" in text


def test_a_measurement_that_fails_ends_no_other(prepared: shape.Prepared) -> None:
    class Broken(HostRunner):
        def segments_ms(self, batch: int, context: int, repeats: int) -> dict[str, float]:
            raise OSError("out of memory\nand more")

    found = measure.side(Broken(prepared, OrtBackend(1)), QUICK)
    assert found["segments"][0]["parts"] == {"skipped": "OSError: out of memory"}
    assert all("ms" in run for run in found["passes"])


def test_the_floor_is_the_slower_of_reading_and_computing(prepared: shape.Prepared) -> None:
    measured = {"copy_bytes_per_second": 1e9, "matrix_operations_per_second": 1e12}
    one, eight = (floor.floor_ms(prepared, measured, batch) for batch in (1, 8))
    assert one["reading"] == eight["reading"] == prepared.weight_bytes / 1e6
    assert eight["computing"] == 8 * one["computing"]
    assert eight["floor"] == max(eight["reading"], eight["computing"])
    del measured["matrix_operations_per_second"]
    alone = floor.floor_ms(prepared, measured, 8)
    assert alone["floor"] == alone["reading"] == one["reading"]


def test_the_released_shape_is_what_a_gpu_gets() -> None:
    full = shape.FULL
    assert full.layers * full.copies == 30
    assert full.batches == (1, 2, 4, 8)
    assert full.contexts == (512, 4096, 32_768)
    assert full.steps == 16
    assert experts.CAPACITIES == (32, 48, 64, 128, 160, 256)


def test_a_table_without_any_side_is_still_a_table() -> None:
    data = {
        "device": "none",
        "date": "2026-01-01",
        "shape": {"name": "small", "layers": 2, "copies": 2, "precision": "fp32", "steps": 3},
        "versions": {},
        "weight_bytes": 1,
        "command": "x",
        "rates": {"skipped": "no torch"},
        "floor": {},
        "sides": {"tensorrt": {"skipped": "no GPU"}},
        "experts": {},
        "routing": "random",
        "mean_load": 32,
    }
    assert "- tensorrt: no GPU" in markdown(data)
