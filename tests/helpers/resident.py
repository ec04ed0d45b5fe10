"""Requests and profiles for a model whose state is on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from canvasrt.runtime.request import Request, Result
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.reference import Pair

Prompt = Callable[..., list[int]]

CANVAS, WINDOW = 32, 64  # of the tiny model


def profiles(**sizes: tuple[int, int, int]) -> list[dict[str, dict[str, int]]]:
    return [
        {name: dict(zip(("min", "opt", "max"), size, strict=True)) for name, size in sizes.items()}
    ]


def body_profiles(**sizes: tuple[int, int, int]) -> dict[str, Any]:
    known = {
        "batch": (1, 2, 4),
        "length": (1, CANVAS, 512),
        "capacity": (1, 64, 2048),
        "octets_sliding": (1, 8, 8),
        "octets_full": (1, 32, 128),
    }
    return {"body": profiles(**(known | sizes))}


def requests(pair: Pair, prompt: Prompt, lengths: list[int], **params: Any) -> list[Request]:
    given = {"max_new_tokens": 3 * CANVAS, "max_denoising_steps": 8} | params
    return [
        Request(
            prompt(length, seed),
            SamplingParams.from_defaults(pair.model.sampler, pair.model.config, seed=seed, **given),
        )
        for seed, length in enumerate(lengths)
    ]


def same(ours: list[Result], theirs: list[Result]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.token_ids, a.steps) == (b.token_ids, b.steps)
