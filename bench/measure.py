"""The measurements, one function each. What a side cannot do is recorded with the reason."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.runner import ROUTINGS, Routing, Runner
from bench.shape import Shape
from canvasrt.types import Json

PROMPT_OF_GENERATION = 512


def attempt(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or `{"skipped": why}`, so that one failure does not end the others."""
    try:
        return work()
    except Exception as error:  # any exception: a run on a GPU is too expensive to lose
        text = str(error).strip().splitlines()
        return {"skipped": f"{type(error).__name__}: {text[0] if text else 'no reason given'}"}


def passes(runner: Runner, shape: Shape) -> list[Json]:
    """Measure a denoising pass at every batch and context, with canvases of each routing."""

    def one(batch: int, context: int) -> Json:
        took = runner.pass_ms(batch, context, shape.repeats)
        found = {"ms": statistics.median(took), "min": min(took), "max": max(took)}
        for routing in ROUTINGS[1:]:
            if others := runner.pass_ms(batch, context, shape.repeats, routing):
                found[f"{routing}_ms"] = statistics.median(others)
        return found

    return [
        {"batch": batch, "context": context} | attempt(partial(one, batch, context))
        for context in shape.contexts
        for batch in shape.batches
    ]


def segments(runner: Runner, shape: Shape) -> list[Json]:
    """Measure the parts of a pass, at batch 1."""
    found = []
    for context in shape.contexts:
        parts = attempt(partial(runner.segments_ms, 1, context, shape.repeats))
        if parts:
            found.append({"batch": 1, "context": context, "parts": parts})
    return found


def generation(runner: Runner, shape: Shape) -> list[Json]:
    """Measure whole requests of two blocks after a prompt, with all steps taken."""
    prompt = min(PROMPT_OF_GENERATION, min(shape.contexts))

    def one(batch: int) -> Json:
        runner.generate(batch, prompt, 2, shape.steps)  # warm-up
        run = runner.generate(batch, prompt, 2, shape.steps)
        pass_seconds = statistics.median(run.step_seconds)
        tokens = run.tokens / 2  # one block each
        return {
            "tokens_per_second": run.tokens / run.seconds,
            "tokens_per_second_of_steps_alone": tokens / (shape.steps * pass_seconds),
            "first_tokens_ms": 1e3 * run.first_tokens,
        }

    return [
        {"batch": batch, "prompt": prompt, "steps": shape.steps} | attempt(partial(one, batch))
        for batch in shape.batches
    ]


def _loads(runner: Runner, context: int, routing: Routing) -> list[int]:
    return runner.loads() if runner.pass_ms(1, context, 1, routing) else []


def side(runner: Runner, shape: Shape) -> Json:
    """Measure everything about one side."""
    found: Json = {"passes": passes(runner, shape), "segments": segments(runner, shape)}
    found["generation"] = generation(runner, shape)
    found["expert_loads"] = {
        routing: attempt(partial(_loads, runner, shape.contexts[0], routing))
        for routing in ROUTINGS
    }
    found["memory_bytes"] = runner.memory()
    return found
