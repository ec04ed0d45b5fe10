"""Tensor sizes as expressions of a call's dimensions."""

from __future__ import annotations

import pytest

from canvasrt.roofline.dims import UNKNOWN, Dim, evaluate, fix, from_terms, names_in, times

SIZES = {"batch": 3, "length": 256, "capacity": 130, "past_full": 1000}


@pytest.mark.parametrize(
    ("dim", "size", "fixed"),
    [
        (7, 7, 7),
        ("batch", 3, 1),
        ("8*batch*length", 6144, 2048),
        ("length+past_full", 1256, "past_full+256"),
        ("8*capacity+1", 1041, "8*capacity+1"),
        ("batch*capacity", 390, "capacity"),
        ("capacity/128", 2, "capacity/128"),
        ("batch*length/128", 6, 2),
        ("batch*capacity/128", 4, "capacity/128"),
    ],
)
def test_a_size_has_a_number_and_is_fixed_in_part(dim: Dim, size: int, fixed: Dim) -> None:
    assert evaluate(dim, SIZES) == size
    assert fix(dim, {"batch": 1, "length": 256}) == fixed


def test_terms_become_text() -> None:
    dim = from_terms({("batch", "length"): 8, (): 1})
    assert dim == "8*batch*length+1"
    assert names_in(dim) == {"batch", "length"}
    assert from_terms({(): 5}) == 5
    assert from_terms({}) == 0


@pytest.mark.parametrize(
    ("factors", "product"),
    [
        ([2, "batch", 8], "16*batch"),
        (["8*batch", "length", 2], "16*batch*length"),
        ([4, 8], 32),
        (["length+past_full"], "length+past_full"),
        ([2, "length+past_full"], UNKNOWN),  # callers never multiply sums
    ],
)
def test_products_of_sizes_merge_their_numbers(factors: list[Dim], product: Dim) -> None:
    assert times(factors) == product
