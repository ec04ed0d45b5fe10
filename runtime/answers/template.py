"""Canvases with labels to choose from: fixed tokens, and slots where the questions' labels stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from canvasrt.errors import CanvasError

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Fork:
    """A place where labels part: the tokens that they share so far, and those that may follow."""

    prefix: TokenIds
    children: TokenIds  # ascending


@dataclass(frozen=True)
class Labels:
    """The labels of one question as tokens, all of one length, no two the same."""

    tokens: tuple[TokenIds, ...]

    @property
    def width(self) -> int:
        return len(self.tokens[0])

    @cached_property
    def forks(self) -> tuple[Fork, ...]:
        """Every fork of the tree of labels, the shallowest first."""
        followers: dict[TokenIds, set[int]] = {}
        for label in self.tokens:
            for depth, token in enumerate(label):
                followers.setdefault(label[:depth], set()).add(token)
        found = [
            Fork(prefix, tuple(sorted(children)))
            for prefix, children in followers.items()
            if len(children) > 1
        ]
        return tuple(sorted(found, key=lambda fork: (len(fork.prefix), fork.prefix)))

    def allowed(self, prefix: TokenIds, offset: int) -> TokenIds:
        """Return the tokens, ascending, that labels with this prefix have at `offset`."""
        fitting = (label for label in self.tokens if label[: len(prefix)] == prefix)
        return tuple(sorted({label[offset] for label in fitting}))

    def log_probabilities(self, forks: Sequence[np.ndarray]) -> np.ndarray:
        """Return the labels' log-probabilities `[labels]` by the chain rule.

        forks: per fork, in order, the log-probabilities of its children.
        """
        total = np.zeros(len(self.tokens))
        for number, label in enumerate(self.tokens):
            for fork, logs in zip(self.forks, forks, strict=True):
                depth = len(fork.prefix)
                if label[:depth] == fork.prefix:
                    total[number] += logs[fork.children.index(label[depth])]
        return total


@dataclass(frozen=True)
class Slot:
    """Where the labels of one question stand on a canvas."""

    question: int
    begin: int
    labels: Labels


@dataclass(frozen=True)
class Template:
    """A canvas: fixed tokens `[length]`, and slots, whose own tokens there mean nothing."""

    tokens: tuple[int, ...]
    slots: tuple[Slot, ...]

    @property
    def rounds(self) -> int:
        """The passes per draw and step: as many as the largest tree of labels has forks."""
        return max(len(slot.labels.forks) for slot in self.slots)


def labels_of(labels: Sequence[Sequence[int]], end: int, filler: int, path: str) -> Labels:
    """Return labels made equally long: `end` closes each if their lengths differ, `filler` follows.

    CanvasError, which names `path`, for an empty label or two labels with the same tokens.
    """
    seen: dict[TokenIds, int] = {}
    for number, label in enumerate(map(tuple, labels)):
        if not label:
            raise CanvasError(f"{path}[{number}] has no tokens", "give each option some text")
        if label in seen:
            raise CanvasError(
                f"{path}[{number}] has the same tokens as {path}[{seen[label]}]",
                "give options that the tokenizer tells apart",
            )
        seen[label] = number
    lengths = {len(label) for label in labels}
    if len(lengths) == 1:
        return Labels(tuple(map(tuple, labels)))
    width = max(lengths) + 1
    closed = (tuple(label) + (end,) for label in labels)
    return Labels(tuple(label + (filler,) * (width - len(label)) for label in closed))
