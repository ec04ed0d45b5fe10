"""The statistics of quality reports, compared with published values and independent computations."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from canvasrt.fidelity.answers import marks, pace
from canvasrt.fidelity.compare import StepSeries, divergence, phase_of
from canvasrt.fidelity.limits import FP32, check_limits, limits_of
from canvasrt.fidelity.stats import RelativeError, paired_loss, ratio_interval, wilson


def test_wilson_matches_published_intervals() -> None:
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    for right, asked, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)):
        assert wilson(right, asked) == pytest.approx((low, high), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)
    assert wilson(20, 20)[1] == 1


def test_paired_loss_covers_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    p_lost, p_gained, asked = 0.02, 0.01, 400
    covered = 0
    for _ in range(2000):
        lost, gained, _ = random.multinomial(asked, (p_lost, p_gained, 1 - p_lost - p_gained))
        low, high = paired_loss(int(lost), int(gained), asked)
        covered += low <= p_lost - p_gained <= high
    assert 0.93 < covered / 2000 < 0.975


def test_ratio_interval_holds_the_ratio_and_is_the_same_every_time() -> None:
    theirs = list(np.random.default_rng(1).integers(2, 12, 300))
    ours = [2 * each for each in theirs]
    assert ratio_interval(ours, theirs) == pytest.approx((2, 2))
    noisy = list(np.array(theirs) + np.random.default_rng(2).integers(-1, 2, 300))
    low, high = ratio_interval(noisy, theirs)
    assert low < sum(noisy) / sum(theirs) < high
    assert ratio_interval(noisy, theirs) == (low, high)


def test_relative_error_adds_up_over_arrays() -> None:
    random = np.random.default_rng(0)
    expected = random.normal(size=(3, 5, 7)).astype(np.float32)
    found = expected + random.normal(size=expected.shape).astype(np.float32)
    error = RelativeError()
    for ours, theirs in zip(found, expected, strict=True):
        error.add(ours, theirs)
    assert error.value == pytest.approx(
        np.linalg.norm(found - expected) / np.linalg.norm(expected), rel=1e-6
    )


def test_relative_error_of_zeros() -> None:
    error = RelativeError()
    error.add(np.zeros(3), np.zeros(3))
    assert error.value == 0
    error.add(np.ones(3), np.zeros(3))
    assert math.isinf(error.value)
    with pytest.raises(ValueError, match="shapes"):
        error.add(np.ones((3, 1)), np.ones((1, 3)))


def test_divergence_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    expected, found = (torch.randn(37, 50, generator=generator) * 3 for _ in "ab")
    wanted = torch.nn.functional.kl_div(
        found.log_softmax(-1), expected.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    np.testing.assert_allclose(divergence(expected, found.numpy()), wanted, rtol=1e-4)
    assert divergence(expected, expected.numpy()).max() == 0


def test_a_step_that_is_not_a_number_is_outside_every_limit() -> None:
    series = StepSeries()
    series.kl.append(np.array([0.0, math.nan]))
    series.same.append(np.array([True, True]))
    series.entropy_error.append(np.array([0.0, math.nan]))
    checks = check_limits(FP32, {"steps": {"all": series.to_json()}})
    assert {each["name"]: each["ok"] for each in checks if each["measured"] is not None} == {
        "kl_mean": False,
        "argmax_agreement": True,
        "entropy_error_mean": False,
    }


def test_thirds_of_a_trajectory() -> None:
    assert [phase_of(i, 7) for i in range(7)] == ["early"] * 3 + ["middle"] * 2 + ["late"] * 2


def test_limits_are_the_recipes_or_the_precisions() -> None:
    recipe = {"limits": {"answers_lost": 1.0, "steps_growth": 0.05, "kl_mean": None}}
    assert limits_of({"precision": "fp8", "recipe": recipe}) == {
        "answers_lost": 1.0,
        "steps_growth": 0.05,
    }
    assert limits_of({"precision": "fp32"}) == FP32


def test_what_was_not_measured_does_not_fail_and_says_so() -> None:
    series = StepSeries()
    series.same.append(np.array([True]))
    series.entropy_error.append(np.array([0.0]))
    report = {"steps": {"all": series.to_json()}, "answers": None, "pace": None}
    (found,) = check_limits({"answers_lost": 1.0}, report)
    assert found["ok"]
    assert found["measured"] is None


def test_marks_count_what_only_one_side_got_right() -> None:
    found = marks([(True, True)] * 5 + [(False, True)] * 3 + [(True, False)] + [(False, False)])
    assert (found["asked"], found["lost"], found["gained"]) == (10, 3, 1)
    assert (found["bundle"]["share"], found["reference"]["share"]) == (0.6, 0.8)
    assert found["loss"] == 0.2
    assert found["loss_interval"][0] < 0.2 < found["loss_interval"][1]


def test_pace_is_of_blocks_and_of_passes() -> None:
    def result(steps: list[int], tokens: int) -> Any:
        return SimpleNamespace(steps=steps, token_ids=[0] * tokens)

    found = pace([(result([6, 4], 64), result([4, 4], 64)), (result([2], 20), result([2, 2], 20))])
    assert found["requests"] == 2
    assert found["bundle"] == {"steps_per_block": 4.0, "tokens_per_pass": 7.0}
    assert found["reference"] == {"steps_per_block": 3.0, "tokens_per_pass": 7.0}
    assert found["steps_growth"] == pytest.approx(1 / 3)
    assert found["steps_growth_interval"] == pytest.approx([-1 / 3, 2 / 3])
