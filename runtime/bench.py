"""Measures generation: time per pass, steps per block, tokens per second, time to first tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.request import Request


@dataclass(frozen=True)
class Sample:
    """One measured round of requests that start together and run to completion. Times are in seconds."""

    seconds: float
    tokens: int
    blocks: int
    steps: int  # denoising steps of all requests
    step_seconds: list[float]  # wall time of each denoising step of the batch
    first_tokens: list[float]  # for each request, from its start to the end of its first block

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Spread:
    """Percentiles and extremes of a series of values."""

    median: float
    p10: float
    p90: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        p10, median, p90 = (float(v) for v in np.percentile(values, (10, 50, 90)))
        return cls(median, p10, p90, float(min(values)), float(max(values)))


@dataclass(frozen=True)
class RunSummary:
    """The results of all rounds of one bundle."""

    forward_ms: Spread
    tokens_per_second: Spread
    first_tokens_ms: Spread
    steps_per_block: float
    rounds: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> RunSummary:
        return cls(
            Spread.of([1e3 * value for sample in samples for value in sample.step_seconds]),
            Spread.of([sample.tokens_per_second for sample in samples]),
            Spread.of([1e3 * value for sample in samples for value in sample.first_tokens]),
            sum(sample.steps for sample in samples) / sum(sample.blocks for sample in samples),
            len(samples),
        )

    def to_json(self) -> dict[str, object]:
        """Return all fields as a dictionary."""
        return asdict(self)


def random_prompts(config: ModelConfig, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Return `count` deterministic prompts of `length` ordinary tokens."""
    if length < 1:
        raise CanvasError(f"the prompt length is {length}", "give at least 1")
    special = {config.pad_token_id, config.bos_token_id, *config.eos_token_ids}
    special |= {config.image_token_id, config.boi_token_id, config.eoi_token_id}
    ordinary = np.array([token for token in range(config.vocab_size) if token not in special])
    return np.random.default_rng(seed).choice(ordinary, (count, length)).tolist()


def measure_round(model: Model, requests: Sequence[Request]) -> Sample:
    """Run all `requests` together and time them."""
    generator = Generator(model, max_batch=len(requests))
    steps: list[float] = []
    start = time.perf_counter()
    before = model.counters.denoise_seconds
    results = []
    for request in requests:
        generator.add(request)
    while not generator.idle:
        for event in generator.step():
            if hasattr(event, "result"):
                results.append(event.result)
        steps.append(model.counters.denoise_seconds - before)
        before = model.counters.denoise_seconds
    return Sample(
        seconds=time.perf_counter() - start,
        tokens=sum(len(result.token_ids) for result in results),
        blocks=sum(len(result.steps) for result in results),
        steps=sum(sum(result.steps) for result in results),
        step_seconds=[value for value in steps if value],
        first_tokens=[result.timings.first_block or 0.0 for result in results],
    )
