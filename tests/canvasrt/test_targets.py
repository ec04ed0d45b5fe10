"""The table of targets, and errors for unknown names."""

from __future__ import annotations

import pytest

from canvasrt.errors import UsageError
from canvasrt.targets import GB, TARGETS, check_precision, find_target, parse_targets


def test_the_builder_follows_from_the_capability() -> None:
    """TensorRT-RTX refuses 9.0, 10.0 and 10.3, and its documentation does not name 8.0, so TensorRT builds for
    these."""
    for target in TARGETS:
        data_centre = target.capability in ((8, 0), (9, 0), (10, 0), (10, 3))
        if target.capability is not None:
            assert target.builder == ("tensorrt" if data_centre else "tensorrt-rtx"), target.name
        assert target.builds_anywhere == (not data_centre)


def test_the_released_model_s_first_precision_by_memory() -> None:
    """The weights take 51 GB in bf16, 27 GB in FP8, and 15 GB in 4 bits."""
    for target in TARGETS:
        if target.memory is not None:
            bits = {"bf16": 16, "fp8": 8}.get(target.precision, 4)
            assert bits < 16
            assert bits == 4 or target.memory >= 48 * GB, target.name


def test_several_names() -> None:
    assert [each.name for each in parse_targets("cpu, RTX-5090,cpu")] == ["cpu", "rtx-5090"]


@pytest.mark.parametrize("names", ["rtx-9090", "cpu,gpu", "", ","])
def test_an_unknown_name_is_answered_with_the_valid_ones(names: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_targets(names)
    assert "rtx-5090" in raised.value.hint
    assert "dgx-station" in raised.value.hint


def test_precisions() -> None:
    target = find_target("rtx-5090")
    assert (check_precision(target, None), check_precision(target, "fp8")) == ("nvfp4", "fp8")
    with pytest.raises(UsageError) as raised:
        check_precision(target, "fp16")
    assert ", ".join(target.precisions) in raised.value.hint
