"""The few sizes of passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from canvasrt.pass_shapes import (
    canvas_sizes,
    in_units,
    lengths,
    roomy_capacity,
    round_up,
    widths,
)
from canvasrt.runtime.gpu.shape_choice import PassShapes
from tests.helpers.configs import MAX_SHAPES, RELEASED


@pytest.mark.parametrize("most", [64, 1024, 2048, 33_024, 65_536, 262_144, 524_352, 1_048_576])
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_no_server_has_more_than_24_shapes(most: int, batch: int) -> None:
    shapes = list(PassShapes(RELEASED, 512, most, batch))
    assert len(shapes) == len(set(shapes))
    assert len({shape.sizes for shape in shapes}) <= MAX_SHAPES
    assert {shape.batch for shape in shapes} == {1, batch}


def test_every_pass_has_one_of_them() -> None:
    shapes = PassShapes(RELEASED, 512, 33_024, 1)
    known = set(shapes)
    for held in (0, 1, 2048, 2049, 20_000, 33_024):
        width = round_up(held, shapes.widths)
        found = {shapes.encode(tokens, width) for tokens in range(1, 513)}
        found |= {shapes.denoise(width, load) for load in range(257)}
        assert found <= known
        for shape in found:
            assert shape.length >= 64


def test_up_to_256_tokens_no_expert_can_overflow() -> None:
    shapes = PassShapes(RELEASED, 512, 32_768, 1)
    for tokens in (1, 65, 129, 256):
        shape = shapes.encode(tokens, 2048)
        assert shape.capacity == shape.length >= tokens
    assert shapes.encode(257, 2048).capacity == 80


def test_a_canvas_has_slots_for_the_load_seen_so_far() -> None:
    shapes = PassShapes(RELEASED, 512, 32_768, 1)
    assert shapes.widths == (2048, 4096, 8192, 16_384, 32_768)
    loads = (0, 48, 49, 160, 161, 256)
    for width in shapes.widths:
        found = [shapes.denoise(width, load).capacity for load in loads]
        assert found == [48, 48, 160, 160, 256, 256]


@pytest.mark.parametrize("canvas", [1, 300, 384, 1024])
def test_canvases_of_other_lengths(canvas: int) -> None:
    """A whole canvas fits a pass without overflow; a shorter one is not run with slots that it overflows for ever."""
    model = replace(RELEASED, canvas_length=canvas)
    longest = max(canvas, 512)
    shapes = PassShapes(model, 512, 4096, 1, roomy_capacity(model, longest))
    assert shapes.roomy().capacity == shapes.roomy().length >= canvas
    assert all(shape.capacity > 0 for shape in shapes)
    for size in canvas_sizes(canvas):
        assert shapes.alone(size, 2048, load=canvas).capacity >= size


def test_passes_that_are_shared_have_one_width() -> None:
    """Otherwise the longest request would decide how the others are computed."""
    shapes = PassShapes(RELEASED, 512, 32_768, 4)
    assert shapes.widths == (32_768,)
    assert shapes.shared(32_768).batch == 4
    assert len(list(shapes)) == 9


@pytest.mark.parametrize("most", [2048, 5000, 32_768, 262_144])
def test_a_width_is_at_most_four_times_what_is_needed(most: int) -> None:
    sizes = widths(in_units(most))
    assert sizes[-1] == in_units(most)
    for tokens in range(2048, most, 997):
        assert tokens <= round_up(tokens, sizes) < 4 * tokens + 64
    assert lengths(32) == (32,)
    assert lengths(512) == (64, 128, 256, 512)
