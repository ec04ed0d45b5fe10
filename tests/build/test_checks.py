"""What is refused before a build starts, and what the refusal says would work."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from canvasrt.build import plan
from canvasrt.build.checks import check_buildable, check_graphs, check_memory, precisions_built
from canvasrt.build.pipeline import plan_all
from canvasrt.build.plan import Plan, Source
from canvasrt.build.profiles import PREFILL_CHUNK, profile
from canvasrt.errors import CanvasError
from canvasrt.machine import Gpu, builds_here, runs_here
from canvasrt.targets import TARGETS, find_target, parse_targets
from tests.canvasrt.test_memory import RELEASED

BODY = {"name": "body_0", "layers": [0, 1, 2, 3, 4, 5]}


def released(target: str, precision: str, context: int = 32_768, batch: int = 4) -> Plan:
    source = Source(Path("released"), RELEASED, {"kind": "checkpoint"}, None)
    return plan(source, target, "out", precision, context, batch)


def test_each_target_builds_what_this_version_has() -> None:
    built = {target.name: precisions_built(target) for target in TARGETS}
    assert built.pop("cpu") == ("fp32",)
    assert built.pop("rtx-5090") == ()
    assert set(built.values()) == {("bf16",)}


@pytest.mark.parametrize(
    ("target", "precision", "said", "hint"),
    [
        ("rtx-4090", "fp8", "fp8 engines for rtx-4090 are not built", "--precision bf16"),
        ("rtx-5090", "nvfp4", "nvfp4 engines for rtx-5090", "rtx-4090, rtx-pro-6000, dgx-spark"),
        ("h100", "bf16", r"built on its GPU \(H100\)", r"canvasrt[tensorrt]"),
    ],
)
def test_refusals(target: str, precision: str, said: str, hint: str) -> None:
    with pytest.raises(CanvasError, match=said) as raised:
        check_buildable(find_target(target), precision)
    assert hint in raised.value.hint


def test_a_missing_builder_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(CanvasError, match="tensorrt_rtx") as raised:
        check_buildable(find_target("rtx-4090"), "bf16")
    assert raised.value.hint == "pip install 'canvasrt[rtx]'"


def test_a_data_centre_target_needs_its_gpu_and_then_tensorrt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h100 = find_target("h100")
    assert builds_here(h100) == "needs its GPU (H100)"
    monkeypatch.setattr("canvasrt.machine.gpus", lambda: (Gpu("H100", 80 * 10**9, (9, 0), "1"),))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert builds_here(h100) == "needs canvasrt[tensorrt]"
    assert runs_here(h100) == "not in this version"
    with pytest.raises(CanvasError) as raised:
        check_buildable(h100, "bf16")
    assert raised.value.hint == "pip install 'canvasrt[tensorrt]'"


def test_graphs_of_another_precision() -> None:
    target = find_target("rtx-4090")
    check_graphs(target, "bf16", None)
    check_graphs(target, "bf16", "bf16")
    with pytest.raises(CanvasError, match="the graphs are fp32") as raised:
        check_graphs(target, "bf16", "fp32")
    assert "canvasrt export CHECKPOINT --precision bf16" in raised.value.hint


def test_a_cpu_beside_gpus_keeps_its_precision(checkpoint_files: Path, tmp_path: Path) -> None:
    def precisions(names: str, precision: str | None) -> list[str]:
        plans = plan_all(
            checkpoint_files, parse_targets(names), tmp_path, precision, None, 1, check=False
        )
        return [each.precision for each in plans]

    assert precisions("rtx-4090,cpu", "bf16") == ["bf16", "fp32"]
    assert precisions("rtx-4090,cpu", None) == ["fp8", "fp32"]
    with pytest.raises(CanvasError, match="cpu has no precision 'bf16'"):
        precisions("cpu", "bf16")


def test_engines_that_do_not_fit_are_refused_with_what_would() -> None:
    check_memory(released("rtx-pro-6000", "bf16"))
    with pytest.raises(CanvasError, match=r"take 5\d\.\d GB, and rtx-4090 has 24\.0 GB") as raised:
        check_memory(released("rtx-4090", "bf16"))
    assert "--target rtx-pro-6000" in raised.value.hint
    with pytest.raises(CanvasError) as raised:
        check_memory(released("rtx-pro-6000", "bf16", 262_144, 8))
    assert "--max-batch" in raised.value.hint
    assert "--max-context 131072" in raised.value.hint
    assert "--precision fp8 (not built yet)" in raised.value.hint


def test_profiles_of_the_released_model() -> None:
    sizes = profile(BODY, RELEASED, max_context=32_768, max_batch=4)
    assert {name: (size.min, size.max) for name, size in sizes.items()} == {
        "batch": (1, 4),
        "length": (1, 512),
        "capacity": (1, 512),
        "past_full": (0, 32_768),
        "past_sliding": (0, 1023),
    }
    assert sizes["capacity"].opt == 128
    assert all(size.min <= size.opt <= size.max for size in sizes.values())


def test_a_segment_has_the_pasts_of_its_layers() -> None:
    sizes = profile({**BODY, "layers": [0, 1]}, RELEASED, 4096, 1)
    assert "past_sliding" in sizes
    assert "past_full" not in sizes


def test_one_row_never_overflows_and_few_experts_get_what_they_start_with() -> None:
    small = replace(RELEASED, num_experts=4, top_k_experts=2)
    assert profile(BODY, small, 4096, 4)["capacity"].max == 2048
    assert profile(BODY, small, 300, 1)["capacity"].max == 300


def test_the_runtime_s_chunk_fits_the_profile() -> None:
    from canvasrt.runtime import model

    assert model.PREFILL_CHUNK == PREFILL_CHUNK
