"""What is refused before a build starts, and whether the suggested alternatives work."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from canvasrt.build import checks
from canvasrt.build import needs as host
from canvasrt.build.checks import check_machine, check_memory, check_source
from canvasrt.build.needs import builder_memory, check_disk, check_memory_here
from canvasrt.build.options import BuildOptions, Precision, parse_precision
from canvasrt.build.plan import Plan, cut_alike
from canvasrt.build.reuse import reusable_graphs
from canvasrt.build.source import Source, find_source
from canvasrt.checkpoints.quantized import Quantization
from canvasrt.cli import build as cli
from canvasrt.cli.options import adapters
from canvasrt.console import choose_json
from canvasrt.defaults import ADAPTER_FILES
from canvasrt.errors import CanvasError, UsageError
from canvasrt.machine import Gpu, available_bytes, builds_here, memory_bytes
from canvasrt.pipeline import plan_all
from canvasrt.targets import find_target, parse_targets
from tests.helpers.configs import RELEASED
from tests.helpers.planned import plan


def released(target: str, precision: str, context: int = 32_768, batch: int = 4) -> Plan:
    source = Source(Path("released"), RELEASED, {"kind": "checkpoint"})
    options = BuildOptions(precision, max_context=context, max_batch=batch)
    return plan(source, target, "out", options)


def check_space(plans: list[Plan]) -> None:
    checks.check_space(plans, reusable_graphs(plans))


def test_a_dry_run_says_what_would_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a GPU, `not_here` gives the reason and `hint` an alternative. A build for a CPU is never refused for its
    size."""
    monkeypatch.setattr(checks, "memory_bytes", lambda: 24 * 10**9)
    monkeypatch.setattr("canvasrt.build.checks.check_cache", lambda: None)
    monkeypatch.setattr(checks, "check_disk", lambda needed: None)
    plans = [released("rtx-4090", "fp8"), released("cpu", "fp32"), released("cpu", "int4", 4096, 1)]
    choose_json(True)
    cli._show_plans(plans)
    choose_json(False)
    first, second, third = json.loads(capsys.readouterr().out)
    assert "fp8 engines for 4 requests of 32768 tokens take" in first["not_here"]
    assert first["hint"] == "this would fit: --precision int4"
    assert (second["not_here"], third["not_here"]) == (None, None)
    assert second["hint"] == "this would fit: --precision int4 --max-context 32768 --max-batch 1"
    assert third["hint"] is None
    cli._show_plans(plans[1:])
    shown = capsys.readouterr().out
    assert "up to 4 requests of 32768 tokens at once" in shown
    assert "up to 1 request of 4096 tokens at once" in shown
    assert shown.count("hint       this would fit: --precision int4") == 1


def test_a_dry_run_looks_at_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canvasrt.build.checks.check_cache", lambda: None)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    not_here, hint, _ = checks.judge(released("cpu", "int4", 4096, 1))
    assert "only 1.0 GB are free" in str(not_here)
    assert "CANVASRT_CACHE" in str(hint)


# The released model as an FP8 checkpoint, which cannot be built in any other precision.
QUANTIZED = Source(Path("fp8"), RELEASED, {"kind": "checkpoint"}, None, "fp8")


def test_a_data_centre_target_needs_its_gpu_and_every_target_its_builder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h100, made = find_target("h100"), released("h100", "fp8")
    assert builds_here(h100) == "needs its GPU (H100)"
    with pytest.raises(CanvasError, match=r"built on its GPU \(H100\)") as raised:
        check_machine(made)
    assert "canvasrt[tensorrt]" in raised.value.hint
    assert "--dry-run" in raised.value.hint
    monkeypatch.setattr("canvasrt.machine.gpus", lambda: (Gpu("H100", 80 * 10**9, (9, 0), "1"),))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert builds_here(h100) == "needs canvasrt[tensorrt]"
    with pytest.raises(CanvasError, match="tensorrt is not installed") as raised:
        check_machine(made)
    assert raised.value.hint == "run `pip install 'canvasrt[tensorrt]'`"
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(CanvasError, match="tensorrt_rtx is not installed") as raised:
        check_machine(released("rtx-4090", "int4"))
    assert raised.value.hint == "run `pip install 'canvasrt[rtx]'`"


def test_what_is_quantized_already_is_built_as_it_is() -> None:
    target = find_target("rtx-5090")
    source = Source(Path("nvfp4"), RELEASED, {"kind": "checkpoint"}, None, "nvfp4")
    check_source(target, Precision("nvfp4"), source)
    with pytest.raises(CanvasError, match="checkpoint's weights are already quantized to nvfp4"):
        check_source(target, parse_precision("fp8"), source)
    with pytest.raises(CanvasError, match="in nvfp4-experts cannot be built") as raised:
        check_source(target, parse_precision("nvfp4-experts"), source)
    assert "rtx-5090, rtx-pro-6000, dgx-spark" in raised.value.hint


def test_a_quantized_checkpoint_without_input_scales_can_be_widened() -> None:
    found = find_source("demo").checkpoint
    assert found
    how = Quantization("compressed-tensors", "FP8-dynamic", "fp8", static=False)
    source = Source(Path("fp8"), RELEASED, {}, None, "fp8", replace(found, quantization=how))
    for target, precision in (("cpu", "fp32"), ("h200", "bf16")):
        made = plan(source, target, "out", BuildOptions(precision))
        assert made.calibrates is None
        assert made.needs.graphs == released(target, precision).needs.graphs


def precisions(checkpoint: Path | str, names: str, precision: str | None) -> list[str]:
    targets, options = parse_targets(names), BuildOptions(precision)
    plans = plan_all(checkpoint, targets, "out", options, check=False)
    return [each.precision.text for each in plans]


@pytest.mark.parametrize(
    ("targets", "precision", "found"),
    [
        ("cpu,rtx-4090,rtx-5090,dgx-spark", None, ["fp32", "int4", "nvfp4-mixed", "nvfp4-mixed"]),
        ("rtx-4090,cpu", "bf16", ["bf16", "fp32"]),
        ("rtx-4090,cpu", "fp8", ["fp8", "fp8"]),
        ("dgx-spark", "nvfp4-experts", ["nvfp4-experts"]),
    ],
)
def test_each_target_gets_the_precision_that_it_has(
    targets: str, precision: str | None, found: list[str]
) -> None:
    assert precisions("demo", targets, precision) == found


def test_a_precision_that_not_all_targets_have() -> None:
    with pytest.raises(UsageError, match="cpu does not support precision 'bf16'"):
        precisions("demo", "cpu", "bf16")
    with pytest.raises(UsageError, match="rtx-4090 does not support precision 'nvfp4'") as raised:
        precisions("demo", "rtx-5090,rtx-4090", "nvfp4")
    assert "leave out --precision" in raised.value.hint
    with pytest.raises(UsageError, match="unknown precision 'int3'") as raised:
        precisions("demo", "rtx-5090", "int3")
    assert "nvfp4-experts" in raised.value.hint


# The options, the error's text, and the text of its hint.
@pytest.mark.parametrize(
    ("wanted", "said", "fits"),
    [
        (("rtx-4090", "bf16"), r"take \d\d\.\d GB, but rtx-4090 has 24\.0", "--precision int4"),
        (("rtx-5090", "fp8", 262_144), "take", "--max-context 16384"),
        (
            ("rtx-pro-6000", "bf16", 262_144, 8),
            "8 requests of 262144 tokens",
            "--max-batch 5, or --max-context 131072, or --precision nvfp4, or --precision fp8, or --precision int4",
        ),
        (("rtx-4080", "int4"), r"has 16\.0 GB", "--max-context 16384 --max-batch 1"),
        (("rtx-5080", "nvfp4"), "take", "--precision int4 --max-context 16384 --max-batch 1"),
    ],
)
def test_engines_that_do_not_fit_are_refused_with_what_would(
    wanted: tuple[Any, ...], said: str, fits: str
) -> None:
    with pytest.raises(CanvasError, match=said) as raised:
        check_memory(released(*wanted))
    assert raised.value.hint == f"this would fit: {fits}"


def test_what_fits_no_option_is_another_target() -> None:
    with pytest.raises(CanvasError) as raised:
        check_memory(replace(released("rtx-4080", "fp8"), source=QUANTIZED))
    assert raised.value.hint.startswith("this would fit: --target rtx-6000-ada, or --target l40s")


def test_the_build_s_own_memory_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < available_bytes() <= memory_bytes()
    monkeypatch.setattr(host, "available_bytes", lambda: 3 * 10**9)
    need = builder_memory("body_0", 2_760_000_000, ["nvfp4"])
    assert 6.4e9 < need < 7.1e9  # 6.4 GB were measured
    turned = builder_memory("body_0", 2_650_000_000, ["int4"])
    assert 11.9e9 < turned < 12.5e9  # 11.9 GB were measured
    assert builder_memory("head", 10**9, ["int8"]) == builder_memory("head", 10**9)
    with pytest.raises(CanvasError, match=r"body_0 takes about 6\.9 GB .* 3\.0 GB are") as raised:
        check_memory_here("body_0", need)
    assert "--layers-per-segment" in raised.value.hint


def test_a_dry_run_offers_shorter_segments_for_a_large_build(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("canvasrt.build.checks.check_cache", lambda: None)
    monkeypatch.setattr(host, "available_bytes", lambda: 20 * 10**9)
    longer = replace(released("rtx-4090", "int4"), layers_per_segment=6)
    cli._show_plans([longer, released("rtx-5090", "nvfp4")])
    first, second = capsys.readouterr().out.split("rtx-5090 →")
    assert "building   12.7 GB of memory, 7.1 GB with --layers-per-segment 3;" in first
    assert "--layers-per-segment" not in second


def test_int4_is_built_in_8_gb_unless_the_card_is_nearly_full() -> None:
    for target in ("rtx-3090", "rtx-4090", "cpu"):
        usual = released(target, "int4")
        assert usual.layers_per_segment == 3
        assert usual.needs.memory < 8e9
        assert checks.lighter_segments(usual) is None
    full = released("rtx-4080", "int4", 8192, 1)
    assert (full.layers_per_segment, full.fits) == (6, True)
    assert not {"prefill_chunk", "vision"} & full.options.keys()
    usual = released("rtx-5090", "nvfp4")
    assert usual.layers_per_segment == 6
    asked = plan(usual.source, "rtx-5090", "out", BuildOptions("nvfp4", layers_per_segment=2))
    assert asked.needs.segments["body_0"] < usual.needs.segments["body_0"]
    asked = plan(usual.source, "rtx-3090", "out", BuildOptions("int4", layers_per_segment=6))
    assert asked.layers_per_segment == 6  # as requested, not shortened


def test_sorted_rows_are_checked_before_anything_is_built() -> None:
    source = Source(Path("released"), RELEASED, {"kind": "checkpoint"})
    options = BuildOptions("int4", experts="sorted")
    # Engines do not contain the experts, so building long segments takes little memory.
    made = plan(source, "rtx-4090", "out", options)
    assert (made.layers_per_segment, made.needs.memory < 8e9) == (6, True)
    odd = replace(source, model=replace(RELEASED, moe_intermediate_size=720))
    with pytest.raises(CanvasError, match="INT4 experts with 720 inputs in blocks of 16"):
        plan(odd, "rtx-4090", "out", options)


@pytest.mark.parametrize("targets", ["rtx-4090,rtx-4080,cpu", "rtx-4080,cpu,rtx-4090"])
def test_targets_of_one_build_share_graphs_so_they_are_cut_alike(targets: str) -> None:
    """If one target has room only for long segments, all targets get long segments."""
    plans = [released(name, "int4", 8192, 1) for name in targets.split(",")]
    assert {each.target.name: each.layers_per_segment for each in plans} == {
        "rtx-4090": 3,
        "rtx-4080": 6,
        "cpu": 3,
    }
    assert [each.layers_per_segment for each in cut_alike(plans)] == [6, 6, 6]
    apart = [released("rtx-4090", "int4", 8192, 1), released("rtx-5090", "nvfp4", 8192, 1)]
    assert [each.layers_per_segment for each in cut_alike(apart)] == [3, 6]


def test_what_is_served_here_must_fit_this_machine() -> None:
    made = released("cpu", "fp32")
    with pytest.raises(
        CanvasError, match=r"take 110\.\d GB, but this machine has 25\.0 GB"
    ) as raised:
        checks.check_memory_to_serve(made, 25 * 10**9)
    assert "canvasrt serve DIR" in raised.value.hint
    assert "--precision int4 --max-context 32768 --max-batch 1" in raised.value.hint
    checks.check_memory_to_serve(made, 120 * 10**9)


def test_disks_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**10))
    check_disk({tmp_path: 9 * 10**9, tmp_path / "not" / "there": 10**9})
    with pytest.raises(CanvasError, match=r"about 12\.0 GB .* 10\.0 GB are free") as raised:
        check_disk({tmp_path: 9 * 10**9, tmp_path / "not" / "there": 3 * 10**9})
    assert "CANVASRT_CACHE" in raised.value.hint


def test_what_a_build_of_the_released_model_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets share the quantized graphs, every capability needs its own engines, and nothing is written in bf16. With
    one target, graphs are removed during the build."""
    needed: dict[Path, int] = {}
    monkeypatch.setattr(checks, "check_disk", needed.update)
    monkeypatch.setattr(checks, "same_disk", lambda one, other: True)
    plans = [released("rtx-5090", "nvfp4"), released("rtx-pro-6000", "nvfp4")]
    check_space(plans)
    (total,) = needed.values()
    assert total == pytest.approx(2 * 16.1e9, rel=0.03)
    check_space(plans[:1])
    assert 16.1e9 < next(iter(needed.values())) < 25e9
    check_space([*plans, released("dgx-spark", "nvfp4")])
    (more,) = needed.values()
    assert more - total == pytest.approx(16.1e9, rel=0.03)
    monkeypatch.setattr(checks, "same_disk", lambda one, other: False)
    check_space([released("cpu", "fp32")])  # files on another disk are copied, not linked
    assert needed[Path("out").resolve()] == pytest.approx(101e9, rel=0.03)


def test_a_calibration_that_nothing_uses_is_refused(
    checkpoint_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BuildOptions("fp32", calibration=tmp_path / "prompts.jsonl")
    with pytest.raises(UsageError, match="--calibration has no effect: fp32 needs no calibration"):
        plan_all(checkpoint_files, parse_targets("cpu"), tmp_path / "out", options)
    graphs: Any = SimpleNamespace(manifest=SimpleNamespace(options={}, segments=[]))
    quantized = Source(Path("fp8"), RELEASED, {}, graphs, "fp8")
    monkeypatch.setattr("canvasrt.pipeline.find_source", lambda source: quantized)
    with pytest.raises(UsageError, match="already quantized needs no calibration"):
        plan_all("fp8", parse_targets("h200"), tmp_path / "out", replace(options, precision="fp8"))


def test_a_shell_that_leaves_a_tilde_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bash does not expand the tilde of `--calibration=~/prompts.jsonl`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompts.jsonl").write_text('{"prompt_ids": [5, 6, 7]}\n')
    options = BuildOptions("fp8", calibration=Path("~/prompts.jsonl"))
    assert plan(find_source("demo"), "rtx-4090", "out", options).calibration_hash
    assert adapters(["~/adapter=0.5"]) == [(tmp_path / "adapter", 0.5)]


def test_options_that_the_model_or_the_graphs_rule_out(tmp_path: Path) -> None:
    source = Source(Path("released"), RELEASED, {"kind": "checkpoint"})
    with pytest.raises(CanvasError, match="no calibration file at nowhere"):
        plan(source, "rtx-5090", "out", BuildOptions(calibration=Path("nowhere")))
    for wrong in (BuildOptions(max_batch=0), BuildOptions(layers_per_segment=0)):
        with pytest.raises(UsageError, match=r"--(max-batch|layers-per-segment) 0 is less than 1"):
            plan(source, "cpu", "out", wrong)
    for context, said in ((262_145, "is more than the model's 262144"), (256, "leaves no room")):
        with pytest.raises(UsageError, match=f"--max-context {context} {said}"):
            plan(source, "cpu", "out", BuildOptions(max_context=context))
    made: Any = SimpleNamespace(manifest=SimpleNamespace(options={"layers_per_segment": 3}))
    graphs = replace(source, graphs=made)
    with pytest.raises(UsageError, match="holds graphs of 3 layers each"):
        plan(graphs, "cpu", "out", BuildOptions(layers_per_segment=4))
    for name in ADAPTER_FILES:
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="holds graphs, but --adapter merges into a checkpoint"):
        plan(graphs, "cpu", "out", BuildOptions(adapters=((tmp_path, 1.0),)))


def test_what_cannot_be_built_is_refused_before_the_source_is_hashed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("canvasrt.pipeline.hash_source", lambda *_: pytest.fail("hashed"))
    monkeypatch.setattr(host, "available_bytes", lambda: 1)
    with pytest.raises(CanvasError, match="building body_0 takes about"):
        plan_all("demo", parse_targets("rtx-4090"), tmp_path / "out", BuildOptions())


def test_a_calibration_is_planned_and_its_prompts_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [5, 6, 7]}\n' * 3)
    options = BuildOptions(calibration=file)
    (made,) = plan_all("demo", parse_targets("rtx-5090"), tmp_path / "out", options)
    needs = made.needs.calibration
    assert needs is not None
    assert (needs.work.prompts, needs.work.sweeps) == (3, needs.work.passes // 3)
    assert made.needs.memory >= needs.memory
    assert needs.seconds() >= 0
    monkeypatch.setattr("canvasrt.pipeline.build_work", lambda work: pytest.fail("built"))
    with pytest.raises(pytest.fail.Exception, match="built"):
        cli.build("demo", "rtx-5090", str(tmp_path / "out"), calibration=file)
    assert "calibrating for nvfp4-mixed: 3 prompts, " in capsys.readouterr().err
    monkeypatch.setattr(host, "available_bytes", lambda: needs.memory - 1)
    with pytest.raises(
        CanvasError, match=r"writing graphs takes about 0\.9 GB of memory"
    ) as raised:
        check_space([made])
    assert "--precision int4" in raised.value.hint
    monkeypatch.setattr("canvasrt.pipeline.hash_source", lambda *_: pytest.fail("hashed"))
    file.write_text('{"prompt_ids": [5]}\n{\n')
    with pytest.raises(CanvasError, match=r"prompts\.jsonl, line 2: it is not JSON"):
        plan_all("demo", parse_targets("rtx-5090"), tmp_path / "out", options)
    assert plan(find_source("demo"), "rtx-4090", "out").needs.calibration is None


def test_graphs_in_fp32_are_read_and_held_at_four_bytes_a_weight(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [5, 6, 7]}\n')
    options = BuildOptions("nvfp4", calibration=file)
    sampler = find_source("demo").checkpoint.sampler  # type: ignore[union-attr]
    said = {"tokenizer": None, "made_from": {}, "sampler": sampler, "options": {}}
    graphs: Any = SimpleNamespace(manifest=SimpleNamespace(**said))
    narrow, wide = (
        plan(Source(tmp_path, RELEASED, {}, graphs, each), "cpu", "out", options).calibrates
        for each in ("bf16", "fp32")
    )
    assert narrow
    assert wide
    assert wide.read == 2 * narrow.read
    assert wide.memory > narrow.memory
