"""What `canvasrt targets` says about the released model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from canvasrt.build.fit import released_fit
from canvasrt.build.memory import parameters, vision_parameters
from canvasrt.checkpoints.released import layer_types, released_model
from canvasrt.targets import GB, TARGETS, find_target
from tests.helpers.memory import estimate


def test_it_is_the_released_model() -> None:
    model = released_model()
    assert sum(parameters(model).values()) == pytest.approx(25.8e9, rel=0.01)
    assert vision_parameters(model) == pytest.approx(0.55e9, rel=0.02)
    assert [i for i, each in enumerate(model.layers) if each.kind == "full"] == [5, 11, 17, 23, 29]
    assert layer_types(2) == ["sliding_attention", "full_attention"]


def test_every_target_of_the_table_runs_it() -> None:
    for target in TARGETS:
        fit = released_fit(target)
        assert fit is not None, target.name
        assert fit.precision in {target.default, *target.precisions}
        if target.memory is not None:
            # The released model fits in the default precision.
            assert fit.precision == target.default, target.name
            assert fit.memory.total <= target.memory


def test_cards_with_24_gb_have_room_beside_it() -> None:
    for name in ("rtx-3090", "rtx-4090", "l4"):
        fit = released_fit(find_target(name))
        assert fit is not None
        assert fit.precision == "int4"
        assert 17e9 < fit.memory.total < 18e9
        assert fit.to_json()["memory"] == fit.memory.total


def test_a_cpu_takes_what_needs_the_least() -> None:
    fit = released_fit(find_target("cpu"))
    assert fit is not None
    assert fit.precision == "int4"
    assert fit.memory.total < estimate(released_model(), "fp32", 8192, 1, on_cpu=True).total / 4


def test_cards_with_16_gb_have_room_without_images() -> None:
    for name in ("rtx-4080", "rtx-5080"):
        card = find_target(name)
        fit = released_fit(card)
        assert fit is not None
        assert fit.precision == "int4"
        assert card.memory == 16 * GB
        assert 15.5e9 < fit.memory.total < 16e9
    # With the vision tower the model would not fit, even if prompts were read a canvas at a time.
    assert estimate(released_model(), "int4", 8192, 1, prefill_chunk=256).total > 16 * GB
    wide = released_fit(find_target("rtx-4090"))
    assert wide is not None
    # Segments of three layers, whose builders take 6 GB instead of 12.
    assert wide.memory == estimate(released_model(), "int4", 8192, 1, layers_per_segment=3)


def test_less_than_that_is_too_little() -> None:
    assert released_fit(replace(find_target("rtx-4080"), memory=15 * GB)) is None
