"""Training examples: a prefix of clean tokens, and the block to denoise after it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bench.demo.tokenizer import PAD, TURN_END_ID, chat_prompt
from canvasrt.demo.tasks import TASKS, Task

# How often each task occurs. Harder tasks occur more often.
TASK_WEIGHTS = {
    "add": 1.5,
    "subtract": 1.8,
    "reverse": 0.6,
    "sort": 0.9,
    "upper": 0.3,
    "count": 1.2,
    "shuffle": 2.5,
    "brackets": 3.0,
}


@dataclass(frozen=True)
class TrainingBatch:
    """A batch of examples. ``prefix`` is padded on the left; ``tasks`` are indices into the task names.

    If the right probabilities are known, ``targets`` has the probability of every token, and ``slots`` is True where
    more than one token is possible. Pictures are given as patches.
    """

    prefix: Tensor  # [batch, longest prefix]
    padding: Tensor  # [batch, longest prefix], True for padding
    block: Tensor  # [batch, canvas length]
    tasks: Tensor  # [batch]
    targets: Tensor | None = None  # [batch, canvas length, vocabulary]
    slots: Tensor | None = None  # bool [batch, canvas length]
    pixels: Tensor | None = None  # [pictures, patches, 3 * patch^2] in [0, 1]
    places: Tensor | None = None  # [pictures, patches, 2], (x, y) of each patch


class Examples:
    """An endless, seeded stream of examples from the training split."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        canvas_length: int,
        seed: int,
        weights: Mapping[str, float] = TASK_WEIGHTS,
    ) -> None:
        self.rng = random.Random(seed)
        self.weights = weights
        self.canvas_length = canvas_length
        self.vocab = tokenizer.get_vocab()
        # The chat template is slow, so it is applied once, around a placeholder.
        around = chat_prompt(tokenizer, "?")
        place = around.index(self.vocab["?"])
        self.before, self.after = around[:place], around[place + 1 :]

    def batches(self, sizes: Sequence[int]) -> list[TrainingBatch]:
        """Draw a batch and split it into parts of these sizes, sorted by prefix length to keep padding small."""
        examples = sorted((self._example() for _ in range(sum(sizes))), key=lambda e: len(e[0]))
        ends = list(accumulate(sizes))
        return [_collate(examples[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    def _example(self) -> tuple[list[int], list[int], int]:
        name = self.rng.choices(list(self.weights), weights=list(self.weights.values()))[0]
        task: Task = TASKS[name]
        prompt = task.draw_from("train", self.rng)
        answer = [*self._ids(task.answer(prompt, self.rng)), TURN_END_ID]
        answer += [PAD] * (-len(answer) % self.canvas_length)
        blocks = len(answer) // self.canvas_length
        # Only an answer's last block teaches the model where to stop, so it is drawn more often.
        last = self.rng.random() < 0.3
        start = self.canvas_length * (blocks - 1 if last else self.rng.randrange(blocks))
        prefix = [*self.before, *self._ids(prompt), *self.after, *answer[:start]]
        return prefix, answer[start : start + self.canvas_length], list(TASKS).index(name)

    def _ids(self, text: str) -> list[int]:
        return [self.vocab[character] for character in text]


def _collate(examples: list[tuple[list[int], list[int], int]]) -> TrainingBatch:
    longest = max(len(prefix) for prefix, _, _ in examples)
    rows = [[PAD] * (longest - len(prefix)) + prefix for prefix, _, _ in examples]
    lengths = torch.tensor([len(prefix) for prefix, _, _ in examples])
    return TrainingBatch(
        prefix=torch.tensor(rows),
        padding=torch.arange(longest)[None] < longest - lengths[:, None],
        block=torch.tensor([block for _, block, _ in examples]),
        tasks=torch.tensor([task for _, _, task in examples]),
    )
