"""The memory estimate, compared with known figures of the released model, and its output in `canvasrt targets`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from canvasrt.build.fit import released_fit
from canvasrt.build.memory import (
    CPU_PROCESS,
    ENGINE_CODE,
    Weights,
    parameters,
    vision_parameters,
)
from canvasrt.build.options import Precision
from canvasrt.build.plan import Plan, PrefillPlan
from canvasrt.build.source import Source
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.released import layer_types, released_model
from canvasrt.targets import GB, TARGETS, find_target
from tests.helpers.configs import RELEASED
from tests.helpers.memory import estimate

SEEING = released_model()


def test_parameters_of_the_released_model() -> None:
    sizes = parameters(SEEING)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert experts == pytest.approx(22.8e9, rel=0.01)
    assert sum(sizes.values()) == pytest.approx(25.8e9, rel=0.01)
    assert sizes["vision"] == pytest.approx(0.55e9, rel=0.02)
    assert replace(SEEING, vision=None).layers == RELEASED.layers
    assert layer_types(2) == ["sliding_attention", "full_attention"]


def test_every_target_of_the_table_runs_it() -> None:
    for target in TARGETS:
        fit = released_fit(target)
        assert fit is not None, target.name
        if target.memory is not None:
            # The released model fits in the target's default precision.
            assert fit.precision == target.default, target.name
            assert fit.memory.total <= target.memory
    assert released_fit(replace(find_target("rtx-4080"), memory=15 * GB)) is None


@pytest.mark.parametrize(
    ("names", "least", "most"),
    [
        (("rtx-3090", "rtx-4090", "l4"), 17e9, 18e9),
        (("rtx-4080", "rtx-5080"), 15.5e9, 16e9),  # these fit only without images
        (("cpu",), 18e9, 19e9),
    ],
)
def test_small_targets_run_it_in_int4(names: tuple[str, ...], least: float, most: float) -> None:
    for name in names:
        fit = released_fit(find_target(name))
        assert fit is not None
        assert fit.precision == "int4"
        assert least < fit.memory.total == fit.to_json()["memory"] < most


def test_16_gb_have_no_room_for_images_and_24_gb_have_room_for_short_segments() -> None:
    # With the vision tower, the model does not fit even if prompts are read in chunks of one canvas.
    assert estimate(SEEING, "int4", 8192, 1, prefill_chunk=256).total > 16 * GB
    wide = released_fit(find_target("rtx-4090"))
    assert wide is not None
    # Segments have three layers; building one takes 6 GB instead of 12.
    assert wide.memory == estimate(SEEING, "int4", 8192, 1, layers_per_segment=3)


def test_a_gpu_holds_the_vision_tower_and_a_cpu_does_not() -> None:
    blind_model = replace(SEEING, vision=None)
    tower = 2 * vision_parameters(SEEING)
    assert Weights(SEEING, "nvfp4").segments()["vision"] == tower
    seeing, blind = (estimate(each, "nvfp4", 8192, 1) for each in (SEEING, blind_model))
    unlike = {"weights": 0, "code": 0, "workspace": 0, "contexts": 0}
    assert replace(seeing, **unlike) == replace(blind, **unlike)
    assert seeing.weights - blind.weights == tower
    assert seeing.code - blind.code == ENGINE_CODE
    on_cpu = [estimate(each, "int4", 8192, 1, on_cpu=True) for each in (SEEING, blind_model)]
    assert on_cpu[0].weights == on_cpu[1].weights
    # In a pass with images, experts have one slot per token.
    assert seeing.workspace > blind.workspace


def test_long_passes_are_given_up_before_sight() -> None:
    def read(model: ModelConfig, memory: int | None) -> PrefillPlan:
        target = replace(find_target("rtx-4080"), memory=memory)
        source = Source(Path("released"), model, {})
        return Plan(source, target, Precision("int4"), 65_536, 1, Path("out")).reading

    usual = PrefillPlan(512, True)
    ways = (usual, PrefillPlan(256, True), PrefillPlan(512, False), PrefillPlan(256, False))
    needed = [
        estimate(SEEING, "int4", 65_536, 1, prefill_chunk=way.prefill_chunk, sees=way.sees).total
        for way in ways
    ]
    assert needed == sorted(needed, reverse=True)
    for limit, way in zip(needed, ways, strict=True):
        assert read(SEEING, limit) == way
    assert read(SEEING, needed[-1] - 1) == read(SEEING, None) == usual
    assert read(RELEASED, needed[-1]) == PrefillPlan(256, False)
    long, short = (estimate(RELEASED, "int4", 65_536, 1, prefill_chunk=n) for n in (512, 256))
    assert short.workspace < long.workspace
    assert short.buffers < long.buffers


def test_only_full_layers_grow_with_the_context() -> None:
    short, long = (estimate(RELEASED, "fp8", n, 1).kv_cache for n in (4096, 8192))
    assert long - short == 5 * 2 * 2 * 512 * 4096 * 2
    assert estimate(RELEASED, "fp8", 8192, 4).kv_cache == 4 * long
    assert estimate(RELEASED, "fp8", 8192, 1, kv_cache="fp8").kv_cache == long // 2


def test_a_recipe_decides_what_each_weight_takes() -> None:
    every = estimate(RELEASED, "nvfp4", 8192, 1).weights
    experts = {name: "nvfp4" for name in parameters(RELEASED) if "experts" in name}
    alone = estimate(RELEASED, "nvfp4", 8192, 1, formats=experts).weights
    assert every < alone < estimate(RELEASED, "fp8", 8192, 1).weights
    assert alone == pytest.approx(9 / 16 * 22.8e9 + 2 * 2.4e9, rel=0.01)


def test_segments_are_the_weights_cut_up() -> None:
    def cut(precision: str, **options: Any) -> dict[str, int]:
        return Weights(RELEASED, precision, **options).segments()

    packed = cut("nvfp4")
    assert list(packed) == ["body_0", "body_1", "body_2", "body_3", "body_4", "head"]
    assert sum(packed.values()) == sum(cut("nvfp4", layers_per_segment=30).values())
    assert packed["body_0"] == pytest.approx(2.76e9, rel=0.02)  # measured
    assert sum(cut("bf16").values()) == 2 * sum(parameters(RELEASED).values())
    # On a CPU, INT4 weights stay packed. All other weights are widened to float32.
    table = RELEASED.vocab_size * RELEASED.hidden_size
    assert 12.9e9 < sum(cut("int4").values()) - 2 * table < 13.2e9
    assert 15.2e9 < sum(cut("int4", on_cpu=True).values()) - table < 15.6e9
    # The head holds a second table for its products, in addition to the table for lookups.
    widened = sum(cut("nvfp4", on_cpu=True).values())
    assert widened == sum(cut("fp32").values()) + 4 * table


def test_scores_of_wide_heads_are_bounded() -> None:
    """Without the bound, scores of all heads would take 4.4 GB, and the softmax as much again."""
    assert estimate(RELEASED, "nvfp4", 32_768, 4).workspace < 5e9


def test_what_passes_between_engines_counts() -> None:
    """Buffers between engines hold the new keys and values of 512 tokens, and hidden states."""
    need = estimate(RELEASED, "bf16", 32_768, 8)
    new = 512 * (25 * 8 * 256 + 5 * 2 * 512) * 2 * 2
    states = (6 * 2048 + 2 * 2048) * 2816 * 2
    assert need.buffers == new + states + 2 * 512 * 32_768 * 2
    assert need.total == sum(asdict(need).values())
    assert need.contexts
    on_cpu = estimate(RELEASED, "bf16", 32_768, 8, on_cpu=True)
    assert on_cpu.buffers == CPU_PROCESS
