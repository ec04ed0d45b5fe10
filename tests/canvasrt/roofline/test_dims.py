"""Sizes in terms of a call's dimensions."""

from __future__ import annotations

import pytest

from canvasrt.roofline.dims import UNKNOWN, evaluate, fix, from_terms, names_in, times, volume

SIZES = {"batch": 3, "length": 256, "capacity": 130, "past_full": 1000}


@pytest.mark.parametrize(
    ("dim", "size"),
    [
        (7, 7),
        ("batch", 3),
        ("8*batch*length", 6144),
        ("length+past_full", 1256),
        ("8*capacity+1", 1041),
        ("capacity/128", 2),
        ("batch*length/128", 6),
        ("batch*capacity/128", 4),
    ],
)
def test_evaluated(dim: int | str, size: int) -> None:
    assert evaluate(dim, SIZES) == size


def test_a_shape_s_volume_is_the_product() -> None:
    assert volume((128, "capacity/128", 4, "batch"), SIZES) == 128 * 2 * 4 * 3


def test_a_size_that_is_not_given_is_an_error_by_name() -> None:
    with pytest.raises(KeyError, match="past_sliding"):
        evaluate("past_sliding+length", SIZES)
    with pytest.raises(KeyError):
        evaluate(UNKNOWN, SIZES)


def test_terms_become_text_and_back() -> None:
    dim = from_terms({("batch", "length"): 8, (): 1})
    assert dim == "8*batch*length+1"
    assert evaluate(dim, SIZES) == 8 * 3 * 256 + 1
    assert from_terms({(): 5}) == 5
    assert from_terms({}) == 0
    assert names_in(dim) == {"batch", "length"}


def test_products_of_sizes_merge_their_numbers() -> None:
    assert times([2, "batch", 8]) == "16*batch"
    assert times(["8*batch", "length", 2]) == "16*batch*length"
    assert times([4, 8]) == 32
    assert times(["length+past_full"]) == "length+past_full"
    assert times([2, "length+past_full"]) == UNKNOWN  # the callers keep such sizes apart


def test_a_profile_s_fixed_sizes_become_numbers() -> None:
    fixed = {"batch": 1, "length": 256}
    assert fix("batch*length", fixed) == 256
    assert fix("8*capacity+1", fixed) == "8*capacity+1"
    assert fix("length+past_full", fixed) == "past_full+256"
    assert fix("batch*capacity", fixed) == "capacity"
    assert fix("batch*length/128", fixed) == 2
    assert fix("batch*capacity/128", fixed) == "capacity/128"
