"""The measurements, each a function of a side; what a side cannot do is noted with its reason."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.runner import Runner
from bench.shape import Shape

Json = dict[str, Any]
PROMPT_OF_GENERATION = 512


def attempt(work: Callable[[], Any]) -> Any:
    """What `work` gives, or `{"skipped": why}`: one measurement that fails ends none of the others."""
    try:
        return work()
    except Exception as error:  # whatever a tool raises; a run on a GPU is too dear to lose
        text = str(error).strip().splitlines()
        return {"skipped": f"{type(error).__name__}: {text[0] if text else 'no reason given'}"}


def passes(runner: Runner, shape: Shape) -> list[Json]:
    """A denoising pass at every batch and context."""

    def one(batch: int, context: int) -> Json:
        took = runner.pass_ms(batch, context, shape.repeats)
        return {"ms": statistics.median(took), "min": min(took), "max": max(took)}

    return [
        {"batch": batch, "context": context} | attempt(partial(one, batch, context))
        for context in shape.contexts
        for batch in shape.batches
    ]


def segments(runner: Runner, shape: Shape) -> list[Json]:
    """Where a pass's time goes, at batch 1."""
    found = []
    for context in shape.contexts:
        parts = attempt(partial(runner.segments_ms, 1, context, shape.repeats))
        if parts:
            found.append({"batch": 1, "context": context, "parts": parts})
    return found


def generation(runner: Runner, shape: Shape) -> list[Json]:
    """Whole requests of two blocks, all steps taken, behind a prompt."""
    prompt = min(PROMPT_OF_GENERATION, min(shape.contexts))

    def one(batch: int) -> Json:
        runner.generate(batch, prompt, 2, shape.steps)  # warms up
        run = runner.generate(batch, prompt, 2, shape.steps)
        pass_seconds = statistics.median(run.step_seconds)
        tokens = run.tokens / 2  # a block each
        return {
            "tokens_per_second": run.tokens / run.seconds,
            "tokens_per_second_of_steps_alone": tokens / (shape.steps * pass_seconds),
            "first_tokens_ms": 1e3 * run.first_tokens,
        }

    return [
        {"batch": batch, "prompt": prompt, "steps": shape.steps} | attempt(partial(one, batch))
        for batch in shape.batches
    ]


def side(runner: Runner, shape: Shape) -> Json:
    """Everything about one side."""
    found: Json = {"passes": passes(runner, shape), "segments": segments(runner, shape)}
    found["generation"] = generation(runner, shape)
    runner_loads = attempt(lambda: (runner.pass_ms(1, shape.contexts[0], 1), runner.loads())[1])
    found["expert_loads"] = runner_loads
    found["memory_bytes"] = runner.memory()
    return found
