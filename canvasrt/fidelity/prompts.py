"""Prompts that the bundle and the reference continue: the demo's questions, ordinary text, or random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.locate import demo_checkpoint
from canvasrt.demo.tasks import TASKS, questions
from canvasrt.runtime.tokenizer import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
RANDOM_PROMPTS = 4
QUESTIONS_A_TASK = 4
TEXTS = (
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "What is 17 times 23? Show how you get there.",
    "Translate into French: The library opens at nine o'clock.",
    "Write a Python function that reverses a linked list.",
    "Name the planets of the solar system in order, as a JSON list.",
    "Summarise the plot of Romeo and Juliet in three sentences.",
    "A train leaves at 14:35 and arrives at 17:10. How long does it take?",
)


@dataclass(frozen=True)
class PromptSet:
    """Prompts as token ids; `kind` is `questions`, `texts` or `random`."""

    kind: str
    tokens: list[list[int]]


def is_demo(checkpoint: Path) -> bool:
    """Return whether a checkpoint has the demo's tokenizer, and so answers the demo's questions."""
    theirs = checkpoint / TOKENIZER_FILE
    ours = demo_checkpoint() / TOKENIZER_FILE
    return theirs.is_file() and theirs.read_bytes() == ours.read_bytes()


def prompts_for(
    checkpoint: Path, tokenizer: Tokenizer | None, config: ModelConfig, room: int
) -> PromptSet:
    """Return prompts for a checkpoint. `room` is the maximum number of tokens per prompt."""
    if tokenizer is not None and tokenizer.has_template:
        if is_demo(checkpoint):
            asked = [each for task in TASKS for each in spread(task, QUESTIONS_A_TASK)]
            return PromptSet("questions", chats(tokenizer, asked))
        return PromptSet("texts", [each[-room:] for each in chats(tokenizer, TEXTS)])
    # Short prompts, and prompts that exceed the sliding window.
    lengths = [min(8, room), min(config.sliding_window + 8, room)]
    randoms = [np.random.default_rng(seed) for seed in range(RANDOM_PROMPTS)]
    return PromptSet(
        "random",
        [
            random.integers(0, config.vocab_size, lengths[seed % 2]).tolist()
            for seed, random in enumerate(randoms)
        ],
    )


def spread(task: str, count: int) -> list[str]:
    """Return `count` evenly spaced held-out questions of a task. If the task has fewer, some are repeated."""
    held_out = questions(task)
    if count >= len(held_out):
        return (held_out * (count // len(held_out) + 1))[:count]
    return [held_out[i * len(held_out) // count] for i in range(count)]


def chats(tokenizer: Tokenizer, texts: list[str] | tuple[str, ...]) -> list[list[int]]:
    """Return the token ids of one chat per text. Each chat's only message is the text."""
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
