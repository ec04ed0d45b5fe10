"""The shapes of passes, and that their number is small."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from canvasrt.build.profile_ranges import profiles, to_json
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.engine_profiles import Profiles, passes_taken
from canvasrt.pass_shapes import (
    PassPlan,
    canvas_sizes,
    in_units,
    lengths,
    plan_passes,
    round_up,
    widths,
)
from tests.helpers.configs import MAX_SHAPES, RELEASED


@pytest.mark.parametrize("most", [64, 1024, 2048, 33_024, 65_536, 262_144, 524_352, 1_048_576])
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_no_server_has_more_than_24_shapes(most: int, batch: int) -> None:
    shapes = list(plan_passes(RELEASED, most, batch).sharing())
    assert len(shapes) == len(set(shapes))
    assert len({shape.sizes for shape in shapes}) <= MAX_SHAPES
    assert {shape.batch for shape in shapes} == {1, batch}


def test_every_pass_has_one_of_them() -> None:
    shapes = plan_passes(RELEASED, 33_024, 1)
    known = set(shapes)
    for held in (0, 1, 2048, 2049, 20_000, 33_024):
        width = round_up(held, shapes.widths)
        found = {shapes.encode(tokens, width) for tokens in range(1, 513)}
        found |= {shapes.denoise(width, load) for load in range(257)}
        assert found <= known
        for shape in found:
            assert shape.length >= 64


def test_up_to_256_tokens_no_expert_can_overflow() -> None:
    shapes = plan_passes(RELEASED, 32_768, 1)
    for tokens in (1, 65, 129, 256):
        shape = shapes.encode(tokens, 2048)
        assert shape.capacity == shape.length >= tokens
    assert shapes.encode(257, 2048).capacity == 80


def test_a_canvas_has_slots_for_the_load_seen_so_far() -> None:
    shapes = plan_passes(RELEASED, 32_768, 1)
    assert shapes.widths == (2048, 4096, 8192, 16_384, 32_768)
    loads = (0, 48, 49, 160, 161, 256)
    for width in shapes.widths:
        found = [shapes.denoise(width, load).capacity for load in loads]
        assert found == [48, 48, 160, 160, 256, 256]


@pytest.mark.parametrize("canvas", [1, 300, 384, 1024])
def test_canvases_of_other_lengths(canvas: int) -> None:
    """For every canvas there is a shape in which it cannot overflow, and an overflow moves it to such a shape."""
    model = replace(RELEASED, canvas_length=canvas)
    shapes = plan_passes(model, 4096, 1)
    assert shapes.without_overflow().capacity == shapes.roomy >= canvas
    assert all(shape.capacity > 0 for shape in shapes)
    for size in canvas_sizes(canvas):
        assert shapes.alone(size, 2048, need=canvas).capacity >= size


def test_passes_that_are_shared_have_one_width() -> None:
    """If the width varied, the longest request would change the results of the others."""
    plan = plan_passes(RELEASED, 32_768, 4)
    shapes = plan.sharing()
    assert (shapes.shared().batch, shapes.shared().width) == (4, 32_768)
    assert set(shapes) - set(plan) == {shapes.shared()}


@pytest.mark.parametrize("most", [2048, 5000, 32_768, 262_144])
def test_a_width_is_at_most_four_times_what_is_needed(most: int) -> None:
    sizes = widths(in_units(most))
    assert sizes[-1] == in_units(most)
    for tokens in range(2048, most, 997):
        assert tokens <= round_up(tokens, sizes) < 4 * tokens + 64
    assert lengths(32) == (32,)
    assert lengths(512) == (64, 128, 256, 512)


SEEING = replace(RELEASED, vision={"pooling_kernel_size": 3})


@pytest.mark.parametrize("model", [RELEASED, SEEING, replace(RELEASED, num_experts=4)])
@pytest.mark.parametrize("chunk", [256, 512])
@pytest.mark.parametrize(("context", "batch"), [(300, 1), (4100, 2), (32_768, 4), (262_144, 8)])
def test_the_plan_of_engines_that_list_none_is_the_one_they_were_built_from(
    model: ModelConfig, chunk: int, context: int, batch: int
) -> None:
    """Bundles of earlier versions have profiles, but no pass plan."""
    passes = plan_passes(model, context, batch, chunk)
    body = {"layers": list(range(6)), "name": "body_0"}
    made = Profiles(to_json(profiles(body, model, passes)))
    assert passes_taken(model, [made], model.max_position_embeddings) == passes
    shorter = passes_taken(model, [made], 200)
    assert shorter == passes.within(200)
    assert (shorter.widths, shorter.lengths) == ((256,), passes.lengths)


def test_a_plan_is_the_same_in_a_manifest() -> None:
    for passes in (plan_passes(SEEING, 33_000, 4), plan_passes(RELEASED, 1000, 1).without_slots()):
        assert PassPlan.from_json(json.loads(json.dumps(passes.to_json()))) == passes
        assert PassPlan.from_json(passes.sharing().to_json()).shares is False
