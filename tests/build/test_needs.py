"""The estimated memory, disk space and time of a build, compared with measured builds (`python -m bench
calibrated`)."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bench.build import memory_of
from bench.synthetic import config_of
from canvasrt.build import calibration_needs as calibration
from canvasrt.build import checks
from canvasrt.build import needs as host
from canvasrt.build import plan as plans
from canvasrt.build.calibration_needs import CalibrationNeeds, calibration_needs
from canvasrt.build.options import BuildOptions, parse_precision
from canvasrt.build.plan import Plan
from canvasrt.build.reuse import held_bytes, is_calibrated, reusable_graphs
from canvasrt.build.source import Source, find_source
from canvasrt.calibration_prompts import CalibrationPrompts
from canvasrt.checkpoints.config import read_config
from canvasrt.machine import return_freed_memory
from canvasrt.pipeline import build_all, plan_all
from canvasrt.targets import find_target
from tests.helpers import library
from tests.helpers.configs import RELEASED
from tests.helpers.planned import plan

PAGES = Path(__file__).parents[2]


def planned(shape: str, layers: int | None, target: str, precision: str) -> Plan:
    model, _ = read_config(config_of(shape, layers), None)
    source = Source(Path(shape), model, {"kind": "checkpoint"})
    return plan(source, target, "out", BuildOptions(precision))


@pytest.mark.parametrize(
    ("shape", "layers", "memory", "disk"),
    [
        ("released", 30, 2.75e9, 15.94e9),
        ("released", 3, 2.54e9, 3.50e9),
        ("300m", 9, 1.22e9, 0.395e9),
        ("narrow", 6, 1.45e9, 0.195e9),
    ],
)
def test_a_build_without_calibration(shape: str, layers: int, memory: int, disk: int) -> None:
    made = planned(shape, layers, "cpu", "int4")
    assert made.needs.memory == pytest.approx(memory, rel=0.1)
    assert made.disk == pytest.approx(disk, rel=0.1)


@pytest.mark.parametrize(
    ("precision", "layers", "memory", "disk"),
    [("fp8", 3, 6.36e9, 7.23e9), ("fp8", 15, 6.15e9, None), ("nvfp4-mixed", 15, 8.07e9, 12.49e9)],
)
def test_a_build_of_engines(
    precision: str, layers: int, memory: float, disk: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 22 GB of free memory, one builder runs at a time; with 60 GB, the two largest run at once."""
    monkeypatch.setattr(host, "available_bytes", lambda: 22 * 10**9)
    made = planned("released", layers, "rtx-5090", precision)
    alone = made.needs.memory
    assert alone == pytest.approx(memory, rel=0.1)
    if disk is not None:
        assert made.disk == pytest.approx(disk, rel=0.1)
    monkeypatch.setattr(host, "available_bytes", lambda: 60 * 10**9)
    assert made.needs.memory - alone == sorted(made.needs.segments.values())[-2]


def calibrating(prompts: int, folder: Path) -> CalibrationNeeds:
    """Return the estimate for calibrating the released model with this many prompts of 60 tokens."""
    file = folder / "prompts.jsonl"
    file.write_text(json.dumps({"prompt_ids": [5] * 60}) + "\n")
    file.write_text(file.read_text() * prompts)
    recipe = parse_precision("nvfp4-mixed").recipe
    assert recipe is not None
    sampler = find_source("demo").checkpoint.sampler  # type: ignore[union-attr]
    return calibration_needs(CalibrationPrompts.of(file, recipe, RELEASED, sampler, {}, {}), folder)


def test_the_released_model_is_calibrated_in_a_few_gb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory does not depend on the number of prompts, because only a few are held at a time."""
    needs = calibrating(300, tmp_path)
    assert 5e9 < needs.memory < 12e9
    assert 1.5e12 < needs.flops / needs.work.passes < 3e12
    assert needs.read / needs.work.sweeps == pytest.approx(2 * 25e9, rel=0.1)
    # The first sweep reads all weights from the disk. Later sweeps read only weights that did not fit into the page
    # cache.
    monkeypatch.setattr(calibration, "_flops_per_second", lambda: 1e30)
    monkeypatch.setattr(calibration, "_bytes_per_second", lambda folder: (1e9, 4e9))
    monkeypatch.setattr(calibration, "_device", lambda: "cuda")
    once = needs.read / needs.work.sweeps
    for free, again in ((0, once), (once, needs.memory), (once + needs.memory, 0)):
        monkeypatch.setattr(calibration, "available_bytes", lambda free=free: free)
        disk = once + (needs.work.sweeps - 1) * again
        expected = disk / 1e9 + (needs.read - disk) / 4e9
        assert needs.seconds() == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("prompts", [16, 64])
def test_the_pages_have_the_predicted_time(
    prompts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The predictions use the rates that docs/benchmarks.md names."""
    needs, took = calibrating(prompts, tmp_path), {}
    monkeypatch.setattr(calibration, "_bytes_per_second", lambda folder: (5e9, 5e9))
    monkeypatch.setattr(calibration, "_widened_per_second", lambda: 12e9)
    for device, rate in (("cpu", 0.75e12), ("cuda", 80e12)):
        monkeypatch.setattr(calibration, "_device", lambda device=device: device)
        monkeypatch.setattr(calibration, "_flops_per_second", lambda rate=rate: rate / 0.75)
        took[device] = math.ceil(needs.seconds() / 60)
    cpu = f"{took['cpu']} min" if prompts == 16 else f"{took['cpu'] / 60:.1f} h"
    row = f"{needs.memory / 1e9:.1f} GB | {cpu} | {took['cuda']} min |"
    assert row in (PAGES / "docs" / "benchmarks.md").read_text("utf-8")
    monkeypatch.setattr(calibration, "_bytes_per_second", lambda folder: (1.5e9, 1.5e9))
    slow = round(needs.seconds() / 60)
    said = {
        16: ("README.md", f"{took['cuda']} to {slow} minutes on an RTX 5090"),
        64: ("docs/benchmarks.md", f"and {slow} for 64."),
    }
    page, text = said[prompts]
    assert text in " ".join((PAGES / page).read_text("utf-8").split())
    if prompts == 16:
        assert f" or {took['cpu']} on 16 cores" in (PAGES / page).read_text("utf-8")


def test_memory_that_was_freed_is_returned() -> None:
    """Without `return_freed_memory`, glibc would keep small freed allocations that lie below one in use."""
    kept = [bytes(100_000) for _ in range(3000)]
    last = bytes(100_000)
    full = memory_of(os.getpid())[1]
    del kept
    return_freed_memory()
    assert full - memory_of(os.getpid())[1] > 200_000_000
    assert last


@pytest.mark.parametrize(
    "place", ["canvasrt.export.graphs._write_host_head", "canvasrt.build.cpu._rewrite"]
)
def test_what_an_interrupted_build_holds_is_not_needed_again(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build is interrupted at one of two points: after the last graph is quantized, or after all graphs are lowered
    and their weights removed."""
    cache, needed = tmp_path / "cache", []
    monkeypatch.setenv("CANVASRT_CACHE", str(library.empty_cache(cache)))
    monkeypatch.setattr(plans, "KEPT_GRAPHS", 0)
    monkeypatch.setattr(checks, "check_disk", lambda folders: needed.append(folders[cache]))
    (made,) = plan_all("demo", [find_target("cpu")], tmp_path / "out", BuildOptions("int4"))
    with monkeypatch.context() as broken:
        broken.setattr(place, lambda *_: pytest.fail("interrupted"))
        with pytest.raises(pytest.fail.Exception, match="interrupted"):
            build_all([made])
    checks.check_space([made], reusable_graphs([made]))
    first, again = needed
    assert first == made.disk
    assert again < 0.7 * first


def test_a_calibration_serves_a_build_with_other_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales do not depend on how layers are divided into segments. The graphs of an interrupted build do."""
    cache, file = library.empty_cache(tmp_path / "cache"), tmp_path / "prompts.jsonl"
    monkeypatch.setenv("CANVASRT_CACHE", str(cache))
    file.write_text('{"prompt_ids": [5]}\n')
    options = BuildOptions("nvfp4-mixed", layers_per_segment=4, calibration=file)
    (made,) = plan_all("demo", [find_target("cpu")], tmp_path / "out", options)
    other = replace(made, layers_per_segment=2)
    assert not is_calibrated(made)
    with monkeypatch.context() as broken:
        broken.setattr("canvasrt.export.graphs._write_host_head", lambda *_: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception, match="stopped"):
            build_all([made])
    assert is_calibrated(made)
    assert is_calibrated(other)
    assert held_bytes([made]) > 10 * held_bytes([other]) > 0
