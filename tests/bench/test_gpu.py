"""The GPU benchmark, run on a CPU: every measurement at a reduced shape, with our side checked
against transformers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import floor, gpu, probe, shape
from bench.__main__ import main
from bench.runner import DeviceRunner, HostRunner, Runner
from bench.transformers_side import repeated_model
from canvasrt.errors import UsageError
from canvasrt.export.quantize.quantize import read_calibration
from canvasrt.machine import Gpu, gpus
from canvasrt.runtime.backends.onnxruntime import OrtBackend
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseInput, EncodeInput
from canvasrt.types import Json
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.sorted_bundles import build_sorted, sorted_backend

pytestmark = pytest.mark.acceptance

QUICK = replace(shape.SMALL, contexts=(64,), repeats=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def prepared(folder: Path) -> shape.Prepared:
    return shape.prepare(QUICK, folder)


def test_the_measurement_says_what_it_left_out(
    prepared: shape.Prepared, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    line = ["gpu", "--small", "--contexts", "64", "--repeats", "1", "--work", str(folder)]
    line += ["--sides", "onnxruntime,tensorrt,transformers", "--precision", "fp8"]
    assert main([*line, "-o", str(out)]) == 0
    data = json.loads(out.read_text())["figures"]
    passes = data["passes, ms"]
    assert [(row["side"], row["batch"]) for row in passes] == [
        *(("onnxruntime", 1), ("onnxruntime", 2), ("transformers", 1), ("transformers", 2))
    ]
    assert all(row["min"] <= row["even"] <= row["max"] for row in passes)
    # transformers draws its own canvases.
    assert [row["side"] for row in passes if "padded" in row] == ["onnxruntime"] * 2
    for row in data["two blocks of 3 steps"]:
        assert row["tokens/s"] > 0
        assert row["first tokens, ms"] > 0
    # Equal tokens go to the same experts.
    loads = data["most tokens of an expert, by layer"]
    even, skewed, padded = (sum(row["tokens"]) for row in loads if row["side"] == "onnxruntime")
    assert even < skewed < padded
    assert padded > 1.5 * even
    (parts,) = data["segments at batch 1, ms"]
    assert list(parts) == ["side", "context", "body_0", "body_1", "head"]
    assert data["engines"]["precision"] == "fp8"
    left_out = {row["side"]: row["skipped"] for row in data["not measured"]}
    assert "CanvasError: TensorRT needs a GPU, and this machine has none" in left_out["tensorrt"]
    assert "| transformers | 2 | 64 |" in capsys.readouterr().out


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU")
def test_the_probe_says_what_each_tool_said(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")
    line = ["probe", "--modules", "tensorrt_rtx", "--capabilities", "SM120,CURRENT,gpu"]
    line[2] = "tensorrt_rtx,provider,engines,sorted"
    assert main([*line, "-o", str(tmp_path / "probe.json")]) == 1  # nothing ran
    rows = json.loads((tmp_path / "probe.json").read_text())["figures"]["outcomes"]
    found = {row["tried"]: row for row in rows}
    assert "bytes" in found["tensorrt_rtx, SM120"]["build"]
    assert "no GPU can be used" in found["tensorrt_rtx, SM120"]["load and run"]
    assert "CUDA driver" in found["tensorrt_rtx, CURRENT"]["build"]
    assert "this machine has no GPU" in found["tensorrt_rtx, gpu"]["build"]
    assert "CUDA provider" in found["provider"]["generate"]
    assert "no target" in found["engines"]["generate"]
    assert "no target" in found["sorted"]["generate"]


def test_only_tensorrt_rtx_is_tried_for_other_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT builds for this machine's GPU only."""
    monkeypatch.setattr("canvasrt.export.graphs.export_graphs", lambda *given, **named: None)
    monkeypatch.setattr(probe, "is_installed", lambda module: True)
    monkeypatch.setattr(probe, "_in_a_process", lambda module, capability, folder: {})
    found = probe.probe(tmp_path, [*probe.MODULES, "engines"], ["CURRENT", "none"])
    assert [tried for tried, _ in found] == [
        *("tensorrt_rtx, CURRENT", "tensorrt_rtx, none", "tensorrt, none", "engines")
    ]


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
    def tried(name: str, capability: str, folder: Path) -> dict[str, str]:
        if name == "sorted":
            raise KeyboardInterrupt
        return {"generate": f"{probe.RAN} here"}

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
    here = Gpu("NVIDIA H100 80GB HBM3", 80 << 30, (9, 0), "580.95")
    monkeypatch.setattr(gpu, "gpus", lambda: (here,))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert main(["gpu", "--sides", "tensorrt", "--work", str(tmp_path / "work")]) == 1
    assert "tensorrt is not installed" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_a_side_that_is_cut_keeps_its_rows(
    prepared: shape.Prepared, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*given: object) -> Iterator[Json]:
        raise KeyboardInterrupt
        yield {}

    monkeypatch.setattr(gpu, "_segments", cut)
    saved: list[Json] = []
    with pytest.raises(KeyboardInterrupt):
        gpu.run(QUICK, folder, True, ["onnxruntime"], None, lambda now: saved.append(dict(now)))
    assert len(saved[-1]["passes, ms"]) == len(QUICK.batches)


def test_a_side_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--small", "--sides", "vllm"]) == 1
    assert "unknown side 'vllm'" in capsys.readouterr().err


def tables_of(runner: Runner) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = {}
    for title, row in gpu.measure_side(runner, QUICK):
        found.setdefault(title, []).append(row)
    return found


def test_a_device_s_side_is_measured_alike(prepared: shape.Prepared) -> None:
    """Measure a fake device, which looks like a GPU to the script."""
    device = DeviceRunner(prepared, FakeBackend())
    host = HostRunner(prepared, OrtBackend(1))
    found = tables_of(device)
    assert all("padded" in row for row in found["passes, ms"])
    (parts,) = found["segments at batch 1, ms"]
    assert list(parts) == ["context", "body_0", "body_1", "head"]
    assert all(ms > 0 for ms in parts.values())
    assert [len(row["tokens"]) for row in found["most tokens of an expert, by layer"]] == [4, 4, 4]
    run = device.generate(2, 40, 2, 3)
    assert run.tokens == host.generate(2, 40, 2, 3).tokens == 2 * 2 * 256
    assert len(run.step_seconds) == 6


def test_engines_over_sorted_rows_are_measured(prepared: shape.Prepared, tmp_path: Path) -> None:
    """Of a fake TensorRT, and our kernels by Triton's interpreter."""
    bundle = build_sorted(prepared.graphs.path, tmp_path / "engines")
    backend, device = sorted_backend(bundle)
    runner = DeviceRunner(prepared, backend, bundle)
    assert len(runner.pass_ms(1, 64, 1)) == 1
    assert device.kernels_run


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


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
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


def test_a_measurement_that_fails_ends_no_other(prepared: shape.Prepared) -> None:
    class Broken(HostRunner):
        def segments_ms(self, batch: int, context: int, repeats: int) -> dict[str, float]:
            raise OSError("out of memory\nand more")

    found = tables_of(Broken(prepared, OrtBackend(1)))
    assert found["segments at batch 1, ms"][0]["skipped"] == "OSError: out of memory"
    assert all("even" in row for row in found["passes, ms"])


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
