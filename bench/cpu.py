"""Compares the speed of a denoising pass on the CPU with the machine's matrix rate, for each bundle.

Bundles take turns. Before each turn, torch multiplies two fp32 matrices of 2,048 x 2,048; the speed of this product is
the machine's matrix rate. Only multiply-adds of matrix products and of attention count as work.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bench import results
from bench.build import memory_of
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.runtime.bench import random_prompts
from canvasrt.runtime.bundle_facts import pass_work
from canvasrt.runtime.model import Model
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.open import open_model
from canvasrt.runtime.passes import DenoiseInput, EncodeInput

PROMPT = 64
WIDTH = 2048


@dataclass
class Subject:
    """One bundle, ready for a pass, and the seconds of its passes."""

    path: Path
    model: Model
    given: DenoiseInput
    memory: int  # bytes that opening the bundle and the first pass added, without mapped files
    seconds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, threads: int) -> Subject:
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

    def run(self, rate: float) -> None:
        """Run one pass, and record its share of `rate`, in multiply-adds per second."""
        begin = time.perf_counter()
        self.model.denoise([self.given])
        self.seconds.append(time.perf_counter() - begin)
        self.shares.append(work(self.model.config) / self.seconds[-1] / rate)


def work(config: ModelConfig) -> int:
    """Return the multiply-adds of a denoising pass after `PROMPT` cached tokens."""
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


def measure(
    bundles: list[Path], threads: int = 1, rounds: int = 7, out: results.Out = None
) -> None:
    """Measure bundles that were built for a CPU, in turns."""
    subjects = [Subject.open(path, threads) for path in bundles]
    rates = []
    for _ in range(rounds):
        for subject in subjects:
            rates.append(matrix_rate(threads))
            subject.run(rates[-1])
    rows = [
        {
            "bundle": each.path.name,
            "pass, ms": 1e3 * statistics.median(each.seconds),
            "of the matrix rate": statistics.median(each.shares),
            "lowest": min(each.shares),
            "highest": max(each.shares),
            "memory, MB": each.memory / 1e6,
        }
        for each in subjects
    ]
    gflops = 2e-9 * statistics.median(rates)
    results.report({"threads": threads, "GFLOP/s in fp32": gflops, "passes": rows}, out)
