"""Infilling, compared with steps of transformers, and the fixed text, which stays unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.infill import (
    Gap,
    InfillRequest,
    InfillResult,
    filled,
    infill_request,
    read_gaps,
)
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.constrained import END
from tests.helpers.reference import Pair
from tests.helpers.restricted import cache_of, restricted_steps


def params(pair: Pair, **options: Any) -> SamplingParams:
    return SamplingParams.from_defaults(pair.model.sampler, pair.model.config, **options)


def run(pair: Pair, request: InfillRequest) -> InfillResult:
    (result,) = Generator(pair.model).run([request])
    assert isinstance(result, InfillResult)
    return result


@pytest.mark.parametrize("seed", range(2))
def test_every_step_is_the_reference_s(
    tiny: Pair, prompt: Callable[..., list[int]], seed: int
) -> None:
    """Compares the canvas after six steps, token by token, with pinned positions and positions restricted to few
    tokens."""
    given = params(tiny, seed=seed, max_denoising_steps=6, early_stop=False, max_new_tokens=32)
    words = np.arange(100, 300, 7)
    canvas = tuple(-1 if place % 3 else 40 + place for place in range(30)) + (1, 0)
    ids = prompt(50, seed)
    result = run(tiny, InfillRequest(ids, given, canvases=(canvas,), words=words, end=1))

    def noise(step: int) -> tuple[np.ndarray, np.ndarray]:
        uniforms, tokens = step_noise(seed, 0, step, 32, tiny.reference.vocab)
        own = words[tokens * len(words) // tiny.reference.vocab]
        return uniforms, np.where(np.array(canvas) < 0, own, canvas)

    allowed = {place: words if token < 0 else (token,) for place, token in enumerate(canvas)}
    cache, first = cache_of(tiny.reference, ids), noise(0)[1].tolist()
    steps = restricted_steps(tiny.reference, cache, len(ids), first, allowed, given, noise, 6)
    assert result.token_ids == steps[-1].argmax[:30].tolist()
    assert result.steps == [6]
    places = [place for place in range(30) if canvas[place] < 0]
    raw = steps[-1].logits[places][:, words].astype(np.float64)
    logs = raw - np.log(np.exp(raw).sum(-1, keepdims=True))
    chosen = [words.tolist().index(result.token_ids[place]) for place in places]
    assert result.logprob == pytest.approx(logs[range(len(places)), chosen].mean(), abs=1e-4)


def ask(pair: Pair, text: str, prompt: str, **options: Any) -> InfillRequest:
    ids = pair.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return infill_request(text, ids, params(pair, **options), pair.model, pair.tokenizer)


@pytest.mark.parametrize(
    ("prompt", "text", "filled_text"),
    [
        ("reverse planet", "te{3}p", "tenalp"),
        ("sort 40172", "0{3}7", "01247"),
        ("12+34=", "The {3} sat {2}.", None),
        ("12+34=", "{1}{2}a{1-2}{1}", None),  # adjacent gaps are returned separately
    ],
)
def test_gaps_are_filled_and_fixed_text_comes_back_unchanged(
    demo: Pair, prompt: str, text: str, filled_text: str | None
) -> None:
    parts = read_gaps(text)
    gaps = [part for part in parts if isinstance(part, Gap)]
    found = filled(run(demo, ask(demo, text, prompt)), demo.tokenizer)
    assert filled_text in (None, found["text"])
    for gap, got in zip(gaps, found["gaps"], strict=True):
        assert gap.least <= len(got) <= gap.most
    left = iter(found["gaps"])
    assert found["text"] == "".join(next(left) if isinstance(p, Gap) else p for p in parts)


def test_of_a_range_the_likeliest_length_is_returned(demo: Pair) -> None:
    """Each length uses the noise of another block, so a request for the first length alone repeats its answer."""
    ranged = run(demo, ask(demo, "te{3-5}p", "reverse planet", seed=2))
    alone = run(demo, ask(demo, "te{3}p", "reverse planet", seed=2))
    assert len(ranged.steps) == 3
    assert ranged.logprob >= alone.logprob
    assert ranged.steps[0] == alone.steps[0]
    if len(ranged.gaps[0]) == 3:
        assert ranged.gaps == alone.gaps


@pytest.mark.parametrize("ends", [(1, END, 50), ()], ids=str)
def test_the_text_ends_as_a_turn_does(
    demo: Pair, monkeypatch: pytest.MonkeyPatch, ends: tuple[int, ...]
) -> None:
    """The text ends with the token that ends a turn, not with the last end token: in the released checkpoint, that one
    begins a tool's result."""
    monkeypatch.setattr(demo.model, "config", replace(demo.model.config, eos_token_ids=ends))
    request = ask(demo, "te{3}p", "reverse planet")
    assert request.end == END
    assert END in request.canvases[0]


def test_gaps_are_read() -> None:
    assert read_gaps("a {2} b{1-3}") == ["a ", Gap(2, 2), " b", Gap(1, 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no gap", "has no gap"),
        ("{0}", "gap {0}"),
        ("{3-2}", "gap {3-2}"),
        ("{40}", "has 40 tokens"),
        ("{1-5} {1-5}", "25 combinations"),
        # Combinations must be counted without being listed.
        ("{1-9999} {1-9999} {1-9999}", "999700029999 combinations"),
        ("{9999}", "has 9999 tokens"),
        ("{3000000000}", "gap .3000000000"),
        ("{" + "9" * 60 + "}", "gap .9999"),
        ("{" + "9" * 5000 + "}", "has 5002 characters"),
        ("a {1} b" + "c" * 100_000, "has 100007 characters"),
    ],
)
def test_wrong_gaps_are_refused(demo: Pair, text: str, message: str) -> None:
    with pytest.raises(CanvasError, match=message):
        ask(demo, text, "x")


def test_the_words_of_a_vocabulary_are_read_once(
    demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a large vocabulary takes half a second, so it happens only once."""
    params = SamplingParams.from_defaults(demo.model.sampler, demo.model.config)
    tokenizer = demo.tokenizer
    infill_request("te{3}p", [2], params, demo.model, tokenizer)
    monkeypatch.setattr(type(tokenizer), "token_bytes", None)
    request = infill_request("te{3}p", [2], params, demo.model, tokenizer)
    assert request.words.size > 50
