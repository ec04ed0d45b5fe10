"""A request's noise, from a counter-based generator, so that tokens depend only on the seed."""

from __future__ import annotations

import threading

import numpy as np


class _Generator(threading.local):
    """One generator per thread, which is reseeded before every draw. Creating a new generator instead would take longer
    than the draw."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.state = self.bits.state


_generator = _Generator()


def step_noise(
    seed: int, block: int, step: int, length: int, vocab_size: int, attempt: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the uniform random numbers and the random tokens of one denoising step of a block.

    The tokens of step 0 are the block's first canvas. In later steps, the uniforms draw a candidate per position, and
    positions whose candidate is not accepted get the random tokens. Every `attempt` has different noise.

    The uniforms are float32 `[length]`, multiples of 2**-24 in [0, 1). The tokens are int64 `[length]` in [0,
    vocab_size).
    """
    # Key and counter determine the numbers, so any backend can reproduce any step.
    state = _generator.state
    state["state"] = {
        "key": np.array([seed, 0], np.uint64),
        "counter": np.array([0, attempt, step, block], np.uint64),
    }
    _generator.bits.state = state
    raw = _generator.bits.random_raw(2 * length)
    uniforms = (raw[:length] >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    tokens = ((raw[length:] >> np.uint64(32)) * np.uint64(vocab_size)) >> np.uint64(32)
    return uniforms, tokens.astype(np.int64)
