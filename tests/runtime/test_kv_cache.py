"""The KV cache: what sliding and full layers keep, and how requests share a pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from canvasrt.expert_slots import Capacity, rounded_capacity
from canvasrt.runtime.body_inputs import Geometry
from canvasrt.runtime.kv_cache import CanvasFeeds, RequestCache, past_feeds
from tests.helpers.configs import CONFIG, LAYERS


def filled(*counts: int) -> RequestCache:
    """Return a cache filled with tokens in these portions. Every value is the token's position."""
    cache = RequestCache(CONFIG)
    for count in counts:
        where = np.arange(cache.length, cache.length + count, dtype=np.float32)
        for index, layer in enumerate(LAYERS):
            shape = (1, layer.num_kv_heads, count, layer.head_dim)
            values = np.broadcast_to(where[None, None, :, None], shape)
            cache.append(index, values, -values)
        cache.advance(count)
    return cache


@pytest.mark.parametrize("counts", [(1,), (3,), (4,), (5,), (12,), (3, 4), (9, 1, 1), (1, 20)])
def test_layers_keep_the_last_window_less_one_or_everything(counts: tuple[int, ...]) -> None:
    cache, total = filled(*counts), sum(counts)
    kept = min(total, 4)
    assert cache.positions("sliding").tolist() == list(range(total - kept, total))
    assert cache.positions("full").tolist() == list(range(total))
    for index, kind in enumerate(("sliding", "full")):
        octets = cache.keys[index]
        assert octets.shape[2:4] == (-(-len(cache.positions(kind)) // 8), 8)
        held = octets[0, 0, :, :, 0].ravel()
        assert held[: cache.kept(kind)].tolist() == cache.positions(kind).tolist()
        assert not held[cache.kept(kind) :].any()
        assert (cache.values[index] == -octets).all()
        assert octets.flags.c_contiguous


@pytest.mark.parametrize("count", [1, 8, 9])
def test_one_request_s_cache_is_not_copied(count: int) -> None:
    cache = filled(count)
    feeds = past_feeds([cache])
    for index in range(len(LAYERS)):
        assert feeds[f"past_key_{index}"] is cache.keys[index]
        assert feeds[f"past_value_{index}"] is cache.values[index]


def test_a_canvas_s_inputs_are_put_together_again_only_when_they_change() -> None:
    canvas, first, second = CanvasFeeds(Geometry()), filled(2), filled(7)
    feeds = canvas.of([first, second], 4)
    assert feeds["positions"].tolist() == [[2, 3, 4, 5], [7, 8, 9, 10]]
    assert not feeds["causal"].any()
    assert canvas.of([first, second], 4) is feeds
    assert canvas.of([first, second], 2)["positions"].tolist() == [[2, 3], [7, 8]]
    assert canvas.of([second, first], 4)["past_positions_full"][0, 0, 6] == 6
    for index, layer in enumerate(LAYERS):
        new = np.ones((1, layer.num_kv_heads, 1, layer.head_dim), np.float32)
        second.append(index, new, new)
    second.advance(1)
    assert canvas.of([second, first], 4)["past_positions_full"][0, 0].tolist() == list(range(8))


def test_capacity_starts_at_twice_the_mean_load_and_follows_the_loads() -> None:
    capacity = Capacity(CONFIG)
    assert capacity.choose(256) == 128
    capacity.record(40, 256)
    assert 40 <= capacity.choose(256) <= 56
    capacity.record(100, 256)
    assert 100 <= capacity.choose(256) <= 124
    for _ in range(20):
        capacity.record(40, 256)
    assert capacity.choose(256) <= 56


@pytest.mark.parametrize("tokens", [1, 2, 31, 256])
def test_capacity_stays_between_one_and_the_tokens(tokens: int) -> None:
    capacity = Capacity(replace(CONFIG, top_k_experts=8))
    assert capacity.choose(tokens) == tokens
    capacity.record(0, tokens)
    assert 1 <= capacity.choose(tokens) <= tokens
    assert rounded_capacity(5.0, 256) == 8
    assert rounded_capacity(8.0, 256) == 8
