"""An answer to a demo question, and how a task's answers are marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from canvasrt.demo.tasks import is_correct

# The longest answer, 30 numbers of a count, takes a little over three blocks.
MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class Reply:
    """One answer: its text, and the denoising steps and blocks that it took."""

    prompt: str
    text: str
    steps: int
    blocks: int


@dataclass(frozen=True)
class Score:
    """The result of one task. `accuracy` is the share of answers that are exactly right."""

    task: str
    max_steps: int
    asked: int
    accuracy: float
    steps_per_block: float


def score(task: str, max_steps: int, replies: Sequence[Reply]) -> Score:
    """Mark a task's answers."""
    right = sum(is_correct(reply.prompt, reply.text) for reply in replies)
    steps = sum(reply.steps for reply in replies) / sum(reply.blocks for reply in replies)
    return Score(task, max_steps, len(replies), right / len(replies), steps)
