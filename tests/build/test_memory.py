"""The memory estimate, against known figures of the released model."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from canvasrt.build.memory import (
    CPU_PROCESS,
    ENGINE_CODE,
    Weights,
    parameters,
    vision_parameters,
)
from canvasrt.build.plan import Plan, PrefillPlan
from canvasrt.build.precision import Precision
from canvasrt.build.source import Source
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.targets import find_target
from tests.helpers.configs import RELEASED
from tests.helpers.memory import estimate


def test_parameters_of_the_released_model() -> None:
    sizes = parameters(RELEASED)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert experts == pytest.approx(22.8e9, rel=0.01)
    assert sum(sizes.values()) == pytest.approx(25.2e9, rel=0.01)


VISION = {
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "head_dim": 72,
    "intermediate_size": 4304,
}


def test_a_gpu_holds_the_vision_tower_and_a_cpu_does_not() -> None:
    model = replace(RELEASED, vision=VISION)
    assert vision_parameters(model) == pytest.approx(550e6, rel=0.02)
    assert Weights(model, "nvfp4").segments()["vision"] == 2 * vision_parameters(model)
    seeing, blind = (estimate(each, "nvfp4", 8192, 1) for each in (model, RELEASED))
    unlike = {"weights": 0, "code": 0, "workspace": 0, "contexts": 0}
    assert replace(seeing, **unlike) == replace(blind, **unlike)
    assert seeing.weights - blind.weights == 2 * vision_parameters(model)
    assert seeing.code - blind.code == ENGINE_CODE
    assert estimate(model, "nvfp4", 8192, 1, sees=False) == blind
    on_cpu = [estimate(each, "int4", 8192, 1, on_cpu=True).weights for each in (model, RELEASED)]
    assert on_cpu[0] == on_cpu[1]
    # Experts have a slot for each token of a pass with images.
    assert seeing.workspace > blind.workspace


def test_long_passes_are_given_up_before_sight() -> None:
    def read(model: ModelConfig, memory: int | None) -> PrefillPlan:
        target = replace(find_target("rtx-4080"), memory=memory)
        source = Source(Path("released"), model, {})
        return Plan(source, target, Precision("int4"), 65_536, 1, Path("out")).reading

    seeing = replace(RELEASED, vision=VISION)
    usual = PrefillPlan(512, True)
    ways = (usual, PrefillPlan(256, True), PrefillPlan(512, False), PrefillPlan(256, False))
    needed = [
        estimate(seeing, "int4", 65_536, 1, prefill_chunk=way.prefill_chunk, sees=way.sees).total
        for way in ways
    ]
    assert needed == sorted(needed, reverse=True)
    for limit, way in zip(needed, ways, strict=True):
        assert read(seeing, limit) == way
    assert read(seeing, needed[-1] - 1) == read(seeing, None) == usual
    assert read(RELEASED, needed[-1]) == PrefillPlan(256, False)


def test_shorter_passes_over_a_prompt_take_less() -> None:
    usual, short = (estimate(RELEASED, "int4", 65_536, 1, prefill_chunk=n) for n in (512, 256))
    assert short.workspace < usual.workspace
    assert short.buffers < usual.buffers
    assert (short.weights, short.kv_cache) == (usual.weights, usual.kv_cache)


def test_the_released_model_needs_four_bits_on_a_24_gb_gpu() -> None:
    memory = find_target("rtx-4090").memory or 0
    assert estimate(RELEASED, "fp8", 8192, 1).total > memory
    assert estimate(RELEASED, "nvfp4", 8192, 1).weights < memory


def test_bf16_fits_an_h100_and_not_an_rtx_5090() -> None:
    need = estimate(RELEASED, "bf16", 32_768, 4).total
    assert need < (find_target("h100").memory or 0)
    assert need > (find_target("rtx-5090").memory or 0)


def test_only_full_layers_grow_with_the_context() -> None:
    short, long = (estimate(RELEASED, "fp8", n, 1).kv_cache for n in (4096, 8192))
    assert long - short == 5 * 2 * 2 * 512 * 4096 * 2
    assert estimate(RELEASED, "fp8", 8192, 4).kv_cache == 4 * long


def test_a_recipe_decides_what_each_weight_takes() -> None:
    every = estimate(RELEASED, "nvfp4", 8192, 1).weights
    experts = {name: "nvfp4" for name in parameters(RELEASED) if "experts" in name}
    alone = estimate(RELEASED, "nvfp4", 8192, 1, formats=experts).weights
    assert every < alone < estimate(RELEASED, "fp8", 8192, 1).weights
    assert alone == pytest.approx(9 / 16 * 22.8e9 + 2 * 2.4e9, rel=0.01)
    assert estimate(RELEASED, "bf16", 8192, 1, formats={}).weights == 2 * sum(
        parameters(RELEASED).values()
    )


def test_segments_are_the_weights_cut_up() -> None:
    cut = Weights(RELEASED, "nvfp4").segments()
    assert list(cut) == ["body_0", "body_1", "body_2", "body_3", "body_4", "head"]
    assert sum(cut.values()) == sum(
        Weights(RELEASED, "nvfp4", layers_per_segment=30).segments().values()
    )
    assert cut["body_0"] == pytest.approx(2.76e9, rel=0.02)  # as measured


def test_an_fp8_cache_takes_half() -> None:
    wide, narrow = (estimate(RELEASED, "fp8", 8192, 1, kv_cache=kv) for kv in (None, "fp8"))
    assert wide.kv_cache == 2 * narrow.kv_cache


def test_scores_of_wide_heads_are_bounded() -> None:
    """All heads at once would need 4.4 GB for scores alone, and as much again for the softmax."""
    need = estimate(RELEASED, "nvfp4", 32_768, 4).workspace
    assert need < 5e9


def test_what_passes_between_engines_counts() -> None:
    """The buffers hold the new keys and values of 512 tokens, and hidden states."""
    need = estimate(RELEASED, "bf16", 32_768, 8)
    new = 512 * (25 * 8 * 256 + 5 * 2 * 512) * 2 * 2
    states = (6 * 2048 + 2 * 2048) * 2816 * 2
    assert need.buffers == new + states + 2 * 512 * 32_768 * 2
    assert need.total == sum(asdict(need).values())
    assert need.contexts
    on_cpu = estimate(RELEASED, "bf16", 32_768, 8, on_cpu=True)
    assert on_cpu.buffers == CPU_PROCESS


def test_int4_is_packed_on_a_cpu_too() -> None:
    """On a CPU, unquantized weights and those in other formats are widened to float32."""
    on_gpu, on_cpu = (
        sum(Weights(RELEASED, "int4", on_cpu=on_cpu).segments().values())
        for on_cpu in (False, True)
    )
    table = RELEASED.vocab_size * RELEASED.hidden_size
    assert 12.9e9 < on_gpu - 2 * table < 13.2e9
    assert 15.2e9 < on_cpu - table < 15.6e9
    widened = sum(Weights(RELEASED, "nvfp4", on_cpu=True).segments().values())
    # The head's products have a table of their own, besides the table for lookups.
    assert widened == sum(Weights(RELEASED, "fp32").segments().values()) + 4 * table
