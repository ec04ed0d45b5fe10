"""How near a denoising pass on the CPU comes to the machine's matrix rate, for each bundle.

    python -m bench.utilization BUNDLE [BUNDLE ...] --threads 1

Bundles take turns, each after a product of two fp32 matrices of 2,048 x 2,048 in torch, whose rate is what counts as
the machine's. Only multiply-adds of products and of attention count as work.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from bench.build_full import memory_of
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.runtime.bench import random_prompts
from canvasrt.runtime.model import Model
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.open import open_model
from canvasrt.runtime.passes import DenoiseInput, EncodeInput
from canvasrt.runtime.tables import pass_work

PROMPT = 64
WIDTH = 2048


@dataclass
class Subject:
    """One bundle, ready for a pass, and what its passes took in seconds."""

    path: str
    model: Model
    given: DenoiseInput
    memory: int  # bytes that opening it and a first pass took, without what is mapped from files
    seconds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    @classmethod
    def open(cls, path: str, threads: int) -> Subject:
        gc.collect()
        before = memory_of(os.getpid())[1]
        model = open_model(path, threads=threads)
        config, row = model.config, model.new_row()
        model.encode([EncodeInput(row, np.array(random_prompts(config, 1, PROMPT)[0]))])
        uniforms, tokens = step_noise(0, 0, 1, config.canvas_length, config.vocab_size)
        hidden = model.first_hidden(tokens)
        given = DenoiseInput(row, hidden, np.float32(0.8), 0.1, uniforms, tokens)
        model.denoise([given])
        return cls(path, model, given, memory_of(os.getpid())[1] - before)

    def measure(self, rate: float) -> None:
        """Run one pass, and note it against a rate in multiply-adds per second."""
        begin = time.perf_counter()
        self.model.denoise([self.given])
        self.seconds.append(time.perf_counter() - begin)
        self.shares.append(work(self.model.config) / self.seconds[-1] / rate)


def work(config: ModelConfig) -> int:
    """Return the multiply-adds of a denoising pass behind `PROMPT` cached tokens."""
    keys = PROMPT + config.canvas_length
    heads = config.num_attention_heads * sum(layer.head_dim for layer in config.layers)
    return pass_work(config) + 2 * config.canvas_length * keys * heads


def matrix_rate(threads: int) -> float:
    """Return the multiply-adds per second of the best of three large products."""
    torch.set_num_threads(threads)
    a = torch.rand(WIDTH, WIDTH)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - begin)
    return WIDTH**3 / min(times)


def main() -> None:
    """Measure the bundles of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("bundles", nargs="+", help="CPU bundles")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    subjects = [Subject.open(path, args.threads) for path in args.bundles]
    rates = []
    for _ in range(args.rounds):
        for subject in subjects:
            rates.append(matrix_rate(args.threads))
            subject.measure(rates[-1])
    print(f"{args.threads} threads, {2e-9 * statistics.median(rates):.0f} GFLOP/s in fp32")
    print("| bundle | pass, ms | of the matrix rate | memory, MB |")
    print("| --- | ---: | ---: | ---: |")
    for each in subjects:
        shares = sorted(each.shares)
        share = f"{statistics.median(shares):.0%} ({shares[0]:.0%} – {shares[-1]:.0%})"
        milliseconds = 1e3 * statistics.median(each.seconds)
        print(f"| {each.path} | {milliseconds:.0f} | {share} | {each.memory / 1e6:.0f} |")


if __name__ == "__main__":
    main()
