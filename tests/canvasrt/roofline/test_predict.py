"""Predicted times of passes of real engines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.predict import reads_per_second
from bench.shape import WIDTHS
from canvasrt.bundle import Bundle
from canvasrt.errors import CanvasError, UsageError
from canvasrt.roofline.group import EXPERTS, HEAD
from canvasrt.roofline.page import write_page
from canvasrt.roofline.predict import Predictor, cached_bytes, weight_bytes
from canvasrt.roofline.rates import GPUS, find_gpu, measured, named
from canvasrt.roofline.report import prediction_report
from canvasrt.targets import TARGETS
from tests.canvasrt.roofline.conftest import Released

GPU = find_gpu("rtx-5090")

pytestmark = pytest.mark.acceptance  # because of `released`


@pytest.fixture(scope="module")
def engines(released: Released) -> Bundle:
    return released("nvfp4", "rtx-5090")


@pytest.fixture(scope="module")
def predictor(engines: Bundle) -> Predictor:
    return Predictor(engines)


def test_a_pass_is_the_sum_of_its_kernels_and_above_its_floor(predictor: Predictor) -> None:
    made = predictor.denoise(GPU, batch=1, context=1024)
    assert made.seconds == pytest.approx(sum(made.parts().values()))
    assert {row.segment for row in made.rows} == {"body_0", "head"}
    assert made.seconds > made.floor_seconds > 0
    assert len(made.rows) * GPU.launch < made.seconds


def test_decisions_encode_their_prompt_and_run_no_head(predictor: Predictor) -> None:
    found = reads_per_second(predictor, GPU, 4, 1024)
    encoded, short = (predictor.encode(GPU, 1024, length).seconds for length in (None, 64))
    assert short < encoded
    assert 1 / found["short"] == pytest.approx(encoded + short)
    passes = predictor.denoise(GPU, 4, 1024)
    head = sum(row.seconds for row in passes.rows if row.segment == "head")
    assert 4 / found["whole"] == pytest.approx(4 * encoded + passes.seconds - head)


def test_the_floor_reads_each_weight_once(predictor: Predictor, engines: Bundle) -> None:
    """The expected bytes follow from the shapes of matrices; norms and scalars are negligible."""
    d, mlp, inner, experts = 2816, 2112, 704, WIDTHS["num_experts"]
    packed, plain = 0.5 + 1 / 16, 2
    layer = packed * 3 * d * (mlp + experts * inner) + plain * d * experts
    sliding = layer + packed * d * (8192 + 4096)
    full = layer + packed * d * (9216 + 8192)
    head = engines.manifest.model.vocab_size * d + plain * 3 * d * mlp  # FP8 table
    rows = predictor.denoise(GPU, batch=1, context=0).rows
    assert weight_bytes(rows) == pytest.approx(2 * sliding + full + head, rel=1e-3)


def test_the_floor_reads_each_past_once(predictor: Predictor) -> None:
    """In a full layer, four kernels read the same values, which count once. Two layers read the sliding window, and one
    reads all tokens."""
    for context, full in ((64, 2048), (2048, 2048), (4096, 4096)):
        made = predictor.denoise(GPU, 1, context)
        dims = made.sizes.dims(predictor.model, predictor.passes)
        by_hand = 2 * 2 * (2 * 1024 * 8 * 256 + full * 2 * 512)
        assert cached_bytes(made.rows, dims) == by_hand
    more = [row for row in made.rows for _ in range(5)]
    assert cached_bytes(more, dims) == 5 * by_hand


@pytest.mark.parametrize("batch", [1, 4])
def test_the_floor_multiplies_only_what_was_routed(predictor: Predictor, batch: int) -> None:
    """The kernels multiply more: every expert multiplies all tokens of a single canvas, and also empty slots of
    several."""
    d, mlp, inner, chosen = 2816, 2112, 704, WIDTHS["top_k_experts"]
    dense = 3 * 3 * d * mlp + d * (2 * (8192 + 4096) + 9216 + 8192)
    operations = 2 * batch * 256 * (dense + 3 * chosen * 3 * d * inner)
    # With these rates, only products in four bits take time.
    fast = {"fp4": 1e15, "fp8": 1e30, "bf16": 1e30, "fp32": 1e30}
    made = predictor.denoise(replace(GPU, bandwidth=1e30, rates=fast), batch, 1024)
    assert made.floor_seconds == pytest.approx(operations / 1e15)


def test_work_grows_with_what_it_depends_on(predictor: Predictor) -> None:
    def parts(**sizes: int) -> dict[str, float]:
        return predictor.denoise(
            GPU, **({"batch": 1, "context": 1024, "capacity": 64} | sizes)
        ).parts()

    few, many = parts(capacity=32), parts(capacity=256)
    assert many.pop(EXPERTS) > 1.3 * few.pop(EXPERTS)
    few.pop("routing"), many.pop("routing")  # routing takes longer, since it fills the slots
    assert many == pytest.approx(few)
    assert parts(context=4000)["attention"] > 1.2 * parts(context=0)["attention"]
    assert parts(context=4000)[HEAD] == parts(context=0)[HEAD]
    one, four = (predictor.denoise(GPU, n, 1024, 64).seconds for n in (1, 4))
    assert one < four < 4 * one


def test_layers_that_are_repeated_count_as_often(engines: Bundle, predictor: Predictor) -> None:
    once = predictor.denoise(GPU, 1, 1024)
    more = Predictor(engines, {1: 5}).denoise(GPU, 1, 1024)
    one_layer = sum(row.seconds for row in once.rows if row.place.layer == 1)
    assert more.seconds == pytest.approx(once.seconds + 4 * one_layer)
    assert weight_bytes(more.rows) > weight_bytes(once.rows)


def test_a_pass_has_as_many_rows_as_the_engines_take(predictor: Predictor) -> None:
    two, four = (predictor.denoise(GPU, batch, 1024) for batch in (2, 4))
    assert (two.sizes, two.seconds) == (four.sizes, four.seconds)


def test_sizes_that_no_profile_holds_are_refused(predictor: Predictor) -> None:
    with pytest.raises(UsageError, match="the engines accept no pass of batch 9 with"):
        predictor.denoise(GPU, batch=9, context=1024)
    with pytest.raises(UsageError, match="5000 cached"):
        predictor.denoise(GPU, batch=1, context=5000)


def test_every_target_with_a_gpu_has_rates_with_a_source() -> None:
    # A target for several capabilities has no rates.
    assert {each.name for each in TARGETS if len(each.capabilities) == 1} <= set(GPUS)
    for gpu in GPUS.values():
        assert "https://" in gpu.source
        assert 2e11 < gpu.bandwidth < 1e13
        # Wider formats are slower.
        assert gpu.rate("fp4") >= gpu.rate("fp8") >= gpu.rate("bf16") > gpu.rate("fp32")
    with pytest.raises(UsageError, match="unknown GPU 'warp'") as refused:
        find_gpu("warp")
    assert "rtx-5090" in refused.value.hint


RATES = {
    "device": "NVIDIA GeForce RTX 5090",
    "copy_bytes_per_second": 1.6e12,
    "matrix_operations_per_second": 150e12,
    "matrix": "8192³ bf16",
}


def rates(folder: Path, **others: Any) -> Path:
    file = folder / "gpu.json"
    file.write_text(json.dumps({"rates": RATES | others}))
    return file


def test_a_measured_gpu_replaces_the_table(tmp_path: Path) -> None:
    found = measured(GPU, rates(tmp_path))
    assert found.bytes_per_second() == 1.6e12
    assert found.arithmetic == pytest.approx(150 / 209.5)
    assert found.seconds(1.6e12, 0, "bf16") == pytest.approx(1 + GPU.launch)
    assert measured(GPU, rates(tmp_path, launch_seconds=2e-6)).launch == 2e-6 != GPU.launch
    # Measured rates of a GPU that the table lacks are accepted for every GPU.
    other = measured(GPU, rates(tmp_path, device="NVIDIA RTX A5000"))
    assert other.bytes_per_second() == 1.6e12
    only = {name: RATES[name] for name in ("device", "copy_bytes_per_second")}
    (tmp_path / "gpu.json").write_text(json.dumps({"rates": only}))
    assert measured(GPU, tmp_path / "gpu.json").arithmetic == GPU.arithmetic


def test_a_file_without_rates_of_that_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CanvasError, match="measured on a CPU"):
        measured(GPU, rates(tmp_path, device="cpu"))
    with pytest.raises(UsageError, match="was measured on NVIDIA L4, not on GeForce RTX 5090"):
        measured(GPU, rates(tmp_path, device="NVIDIA L4"))
    (tmp_path / "gpu.json").write_text("{}")
    with pytest.raises(CanvasError, match="has no measured rates"):
        measured(GPU, tmp_path / "gpu.json")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GB10", "dgx-spark"),
        ("NVIDIA RTX A5000", None),
    ],
)
def test_drivers_names_are_known(device: str, name: str | None) -> None:
    assert named(device) == name


def test_engines_that_do_not_run_there_are_named(predictor: Predictor) -> None:
    for gpu in (GPU, find_gpu("rtx-pro-6000")):
        assert not prediction_report(predictor, gpu, 1, 1024)["foreign"]
    told = prediction_report(predictor, find_gpu("h100"), 1, 1024)["foreign"]
    assert "for compute capability 12.0 and do not run on H100 SXM, which has 9.0" in told


def test_slots_that_cannot_hold_a_pass_are_refused(predictor: Predictor) -> None:
    """256 tokens have 8 of 10 experts each, so an expert needs at least 205 slots, and at most one per token."""
    for capacity in (205, 256):
        predictor.check_capacity(1, capacity)
    for capacity in (204, 257):
        with pytest.raises(UsageError, match=f"{capacity} slots per expert do not suit"):
            predictor.check_capacity(1, capacity)
    # The profile of a full batch has fewer slots than tokens.
    most = max(
        each["capacity"]["max"]
        for each in predictor.entries["body_0"]["profiles"]
        if each["batch"]["max"] == 4
    )
    predictor.check_capacity(4, most)
    with pytest.raises(UsageError, match="do not suit a pass of 1024 tokens") as refused:
        predictor.check_capacity(4, most + 1)
    assert f"at most {most}" in refused.value.hint
    predictor.check_capacity(9, 48)  # only the capacity is checked, not the batch


def test_the_page_shows_parts_and_growth(predictor: Predictor, tmp_path: Path) -> None:
    kept = prediction_report(predictor, GPU, 1, 1024, capacity=224)
    assert {each["capacity"] for each in kept["growth"]["context"]} == {224}
    assert kept["growth"]["context"][0]["ms"] == kept["passes"]["denoise"]["ms"]
    data = prediction_report(predictor, GPU, batch=1, context=1024)
    assert [each["batch"] for each in data["growth"]["batch"]] == [1, 4]
    assert [each["context"] for each in data["growth"]["context"]] == [1024, 4096]
    write_page(data, "engines", tmp_path / "page")
    text = (tmp_path / "page" / "kernels.html").read_text()
    assert text.count("<svg") == 4
    for words in ("A prediction, not a measurement", "shared MLP", "A denoising pass by context"):
        assert words in text
    saved = json.loads((tmp_path / "page" / "kernels.json").read_text())
    assert saved["passes"]["denoise"]["kernels"] == len(predictor.denoise(GPU, 1, 1024).rows)
