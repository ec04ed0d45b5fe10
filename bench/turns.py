"""Time to the first tokens of each turn of a chat, with and without the prefix cache:
`python -m bench.turns BUNDLE`."""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np

from canvasrt.runtime import prefix
from canvasrt.runtime.bench import random_prompts
from canvasrt.runtime.generator import Generator, Request
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.sampling_params import SamplingParams

SYSTEM, QUESTION, ANSWER, TURNS = 400, 50, 100, 4  # tokens; every turn repeats those before it
STEPS, ROUNDS = 8, 25
MEMORY = 2**30
SIDES = ("one pass per 512 tokens", "no cache", "cache")


def main() -> None:
    """Take turns between the sides within each round; print medians in milliseconds.

    It is CPU time on one thread, which other work on the machine does not change.
    """
    model = open_model(sys.argv[1], threads=1)
    times: dict[tuple[str, int], list[float]] = {}
    for round_ in range(ROUNDS + 1):
        for side in SIDES:
            for turn, seconds in enumerate(chat(model, side, seed=round_)):
                if round_:  # the first warms up
                    times.setdefault((side, turn), []).append(seconds)
    print("turn | prompt | " + " | ".join(SIDES))
    for turn in range(TURNS):
        found = [f"{1e3 * statistics.median(times[side, turn]):.0f}" for side in SIDES]
        print(f"{turn + 1} | {prompt_length(turn)} | " + " | ".join(found))


def prompt_length(turn: int) -> int:
    """Return the tokens of a turn's prompt."""
    return SYSTEM + QUESTION + turn * (QUESTION + ANSWER)


def chat(model: Model, side: str, seed: int) -> list[float]:
    """Return the seconds to the first block of each turn, which is all that it generates."""
    whole = np.array(random_prompts(model.config, 1, prompt_length(TURNS), seed=seed)[0])
    params = SamplingParams.from_defaults(
        model.sampler,
        model.config,
        max_new_tokens=model.canvas_length,
        max_denoising_steps=STEPS,
        early_stop=False,
        eos_token_ids=(),
    )
    first, prefix.FIRST = prefix.FIRST, model.prefill_chunk if side == SIDES[0] else prefix.FIRST
    prefixes = prefix.PrefixCache(model, MEMORY) if side == "cache" else None
    generator = Generator(model, prefixes=prefixes)
    seconds = []
    for turn in range(TURNS):
        start = time.process_time()
        generator.run([Request(whole[: prompt_length(turn)].tolist(), params)])
        seconds.append(time.process_time() - start)
    prefix.FIRST = first
    return seconds


if __name__ == "__main__":
    main()
