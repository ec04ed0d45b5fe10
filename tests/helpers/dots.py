"""Pictures of dots that were not used in training: one of every color, and one without dots."""

from __future__ import annotations

import random

import numpy as np

from canvasrt.demo.dots import COLORS, Dots, draw_dots

SMALL, FULL = 70, 280  # soft tokens
_CHOICES = ", ".join(f"{{value: {each}}}" for each in COLORS)
# A file of questions for `canvasrt ask`.
WHICH_COLOR = f"""
layout: bare
questions: [{{type: choice, instructions: "?", choices: [{_CHOICES}]}}]
"""


def pictures() -> list[Dots]:
    """Return a picture of every color. Training pictures are drawn from other seeds."""
    rng = random.Random("tests: dots of every color")
    found: dict[str, Dots] = {}
    while len(found) < len(COLORS):
        dots = draw_dots(rng)
        found.setdefault(dots.color, dots)
    return list(found.values())


def blank(like: Dots) -> Dots:
    """Return a grey picture of the same size."""
    return Dots(np.full_like(like.pixels, 125), "none", 0)
