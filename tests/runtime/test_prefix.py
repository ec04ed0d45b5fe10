"""The prefix cache: it changes no tokens; what it saves, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.pictures import insert, read_picture
from canvasrt.runtime.prefix import PrefixCache, chunks_of
from canvasrt.runtime.request import Request, Result
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.fake_engine import FakeBackend
from tests.helpers.pictures import noise, png

MB = 2**20
CANVAS = 32
Prompt = Callable[..., list[int]]


@pytest.fixture(params=["cpu", "device"])
def model(request: pytest.FixtureRequest, tiny: Any) -> Model:
    """The tiny model, once in host memory and once on a fake device."""
    if request.param == "cpu":
        return tiny.model
    return open_model(tiny.graphs, check=False, backend=FakeBackend())


def request(model: Model, tokens: list[int], seed: int = 0, blocks: int = 2) -> Request:
    params = SamplingParams.from_defaults(
        model.sampler,
        model.config,
        seed=seed,
        max_new_tokens=blocks * CANVAS,
        max_denoising_steps=6,
    )
    return Request(tokens, params)


def told(results: list[Result]) -> list[tuple[list[int], list[int]]]:
    return [(result.token_ids, result.steps) for result in results]


def encoded(model: Model, run: Callable[[], Any]) -> int:
    """Call `run`; return how many tokens were encoded."""
    before = model.counters.encode_tokens
    run()
    return model.counters.encode_tokens - before


@pytest.mark.parametrize("shared", [300, 640])
def test_tokens_are_the_same_with_and_without(model: Model, prompt: Prompt, shared: int) -> None:
    """Prompts share a beginning of several chunks, which may be longer than the longest chunk. Sliding layers keep only
    its last tokens."""
    beginning = prompt(shared)
    prompts = [beginning + prompt(tail, tail) for tail in (1, 30, 200)] + [beginning]
    wanted = [request(model, each, seed) for seed, each in enumerate(prompts)]
    prefixes = PrefixCache(model, 256 * MB)
    without = [Generator(model).run([each])[0] for each in wanted]
    within = [Generator(model, prefixes=prefixes).run([each])[0] for each in wanted]
    assert told(within) == told(without)
    assert [result.cached_tokens for result in without] == [0] * 4
    ends = [end for end in (128, 256, 512) if end <= shared]
    assert [result.cached_tokens for result in within] == [0, *[ends[-1]] * 3]


def test_callers_with_keys_share_nothing(model: Model, prompt: Prompt) -> None:
    """Only callers without a key share the cache, although each of their requests has a different owner."""
    beginning = prompt(300)
    generator = Generator(model, prefixes=PrefixCache(model, 256 * MB))
    owners = ["a", "b", "a", "~1", "b", "~2", ""]
    asked = [replace(request(model, beginning), owner=owner) for owner in owners]
    found = [generator.run([each])[0] for each in asked]
    assert [each.cached_tokens for each in found] == [0, 0, 300, 0, 300, 300, 300]
    assert len(set(map(str, told(found)))) == 1
    # Only as many as run together: a parked request would find its own tokens in the cache.
    for some, shared in ((asked[:4], [0, 0, 1, 0]), (asked[3:], [0, 0, 1, 1])):
        at_once = Generator(model, prefixes=PrefixCache(model, 256 * MB)).run(some)
        assert [each.cached_tokens > 0 for each in at_once] == shared
    at_once = Generator(model, prefixes=PrefixCache(model, 256 * MB)).run(asked)
    assert told(at_once) == told(found)


@pytest.mark.parametrize("plain", [False, True])
def test_keys_and_values_are_the_same_to_the_last_bit(
    tiny: Any, prompt: Prompt, plain: bool
) -> None:
    """Plain graphs have expert slots. Their learned number is also restored."""
    model = open_model(tiny.graphs if plain else tiny.bundle, threads=1)
    prefixes = PrefixCache(model, 256 * MB)
    tokens = prompt(700)

    def past() -> tuple[dict[str, np.ndarray], dict[Any, Any]]:
        generator = Generator(model, prefixes=prefixes)
        generator.add(request(model, tokens))
        while generator._running == [] or not generator._running[0].queue.empty:
            generator.step()
        row = generator._running[0].row
        arrays = {
            f"{name}{layer}": array
            for name in ("keys", "values")
            for layer, array in enumerate(getattr(row.cache, name))
        }
        learned = {key: vars(each) for key, each in row.capacities.items() if "encode" in key}
        return arrays, learned

    (first, learned), (second, restored) = past(), past()
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert bool(learned) == plain
    assert restored == learned  # later passes then have the same shapes


def test_the_least_recently_used_is_dropped_and_memory_is_bounded(
    model: Model, prompt: Prompt
) -> None:
    prefixes = PrefixCache(model, 256 * MB)
    chunk = model.saved_bytes(128)
    if model.device_name == "cpu":
        prefixes = PrefixCache(model, 2 * chunk)
    else:
        prefixes._left = 2 * chunk
    generator = Generator(model, prefixes=prefixes)
    a, b, c = (request(model, prompt(128, seed), blocks=1) for seed in range(3))
    for each in (a, b, a, c):
        generator.run([each])
        assert len(prefixes) <= 2
    assert encoded(model, lambda: generator.run([a])) == 0
    assert encoded(model, lambda: generator.run([b])) == 128


def test_what_does_not_fit_is_not_saved(model: Model, prompt: Prompt) -> None:
    prefixes = PrefixCache(model, 0)
    generator = Generator(model, prefixes=prefixes)
    wanted = [request(model, prompt(140), seed, blocks=1) for seed in range(3)]
    assert told(generator.run(wanted)) == told(Generator(model).run(wanted))
    assert len(prefixes) == 0


def test_what_can_never_fit_drops_nothing() -> None:
    memory = Mock(reserve=lambda limit: limit, saved_bytes=lambda tokens: tokens)
    memory.save = lambda row, tokens: Mock(tokens=tokens)
    prefixes = PrefixCache(memory, 300)
    for size in (100, 200, 400):
        prefixes.add(Mock(), Mock(size=size, key=bytes([size // 100])))
    assert len(prefixes) == 2


def test_a_cleared_cache_gives_its_memory_back(model: Model, prompt: Prompt) -> None:
    prefixes = PrefixCache(model, 256 * MB)
    left = prefixes._left
    Generator(model, prefixes=prefixes).run([request(model, prompt(300), blocks=1)])
    assert prefixes._left < left
    prefixes.clear()
    assert (len(prefixes), prefixes._left) == (0, left)


def test_a_prompt_is_shared_with_its_own_images_alone(tiny: Any, prompt: Prompt) -> None:
    """Two images have the same tokens, but different pixels."""
    model = tiny.model
    first, second = (
        read_picture(png(noise(90, 70, seed)), model.config.vision, 70) for seed in (0, 1)
    )
    tokens = insert([*prompt(128), 510, *prompt(20)], [first], model.config)
    plain = request(model, tokens, blocks=1)
    generator = Generator(model, prefixes=PrefixCache(model, 256 * MB))
    wanted = [replace(plain, pictures=pictures) for pictures in ([first], [second], [], [first])]
    alone = [Generator(model).run([each])[0].token_ids for each in wanted]
    assert [generator.run([each])[0].token_ids for each in wanted] == alone
    assert alone[0] != alone[1]
    for each in wanted:
        assert encoded(model, lambda each=each: generator.run([each])) == 0
    third = read_picture(png(noise(90, 70, 2)), model.config.vision, 70)
    later = replace(plain, pictures=[third])
    # The text before the image is shared by all prompts.
    assert encoded(model, lambda: generator.run([later])) == len(tokens) - 128


def test_answers_to_one_prompt_share_its_prefill(
    model: Model, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image of the prompt is encoded only once, too."""
    picture = read_picture(png(noise(90, 70)), model.config.vision or {}, 70)
    tokens = insert([*prompt(20), 510, *prompt(20)], [picture], model.config)
    wanted = [
        replace(request(model, tokens, seed, blocks=1), pictures=[picture]) for seed in range(3)
    ]
    alone = [Generator(model).run([each])[0] for each in wanted]
    generator = Generator(model, prefixes=PrefixCache(model, 256 * MB))
    seen: list[object] = []
    see = model.see
    monkeypatch.setattr(model, "see", lambda each: seen.append(each) or see(each))
    found: list[Result] = []
    assert encoded(model, lambda: found.extend(generator.run(wanted))) == len(tokens)
    assert told(found) == told(alone)
    assert [each.cached_tokens for each in found] == [0, len(tokens), len(tokens)]
    assert len(seen) == 1


def test_chunks_end_at_fixed_positions() -> None:
    def sizes(length: int, most: int) -> list[int]:
        return [chunk.size for chunk in chunks_of(np.arange(length), most)]

    assert sizes(1500, 512) == [128, 128, 256, 512, 476]
    assert sizes(128, 512) == [128]
    assert sizes(70, 32) == [32, 32, 6]
    assert sizes(300, 100) == [100, 100, 100]


def test_images_are_not_cut_and_count_for_the_key() -> None:
    tokens, groups = np.arange(600), np.full(600, -1)
    groups[100:300], groups[400:540] = 0, 1
    chunks = chunks_of(tokens, 512, groups, [b"a", b"b"])
    assert [each.size for each in chunks] == [300, 240, 60]
    # Here, a chunk is too small for the first image together with the text before it.
    tight = chunks_of(tokens, 256, groups, [b"a", b"b"])
    assert [each.size for each in tight] == [100, 200, 240, 60]
    other = chunks_of(tokens, 256, groups, [b"a", b"c"])
    same = [ours.key == theirs.key for ours, theirs in zip(tight, other, strict=True)]
    assert same == [True, True, False, False]


def test_keys_depend_on_everything_before() -> None:
    tokens = np.arange(300)
    keys = [chunk.key for chunk in chunks_of(tokens, 512)]
    assert [chunk.key for chunk in chunks_of(np.r_[tokens, 5], 512)][:2] == keys[:2]
    other = tokens.copy()
    other[0] += 1
    assert not set(keys) & {chunk.key for chunk in chunks_of(other, 512)}
