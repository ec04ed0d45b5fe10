"""The picture task: count the equal dots on a grey picture, or name their colour."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from canvasrt.demo.odds import ClosedQuestion, choice, predicate

# The names' first letters differ, so one forward pass can tell the colors apart.
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "yellow": (235, 220, 50),
    "white": (250, 250, 250),
    "purple": (150, 50, 180),
}
MOST_DOTS = 3
RADIUS = 0.11  # relative to the square root of the picture's area
_ASPECTS = (0.75, 1.34)
_SIDES = (72, 200)  # square root of the area, in pixels


@dataclass(frozen=True, eq=False)
class Dots:
    """A picture and the right answers about it."""

    pixels: np.ndarray  # uint8 [height, width, 3]
    color: str
    count: int


def draw_dots(rng: random.Random) -> Dots:
    """Return a random picture."""
    color, count = rng.choice(list(COLORS)), rng.randint(1, MOST_DOTS)
    side, aspect = rng.randint(*_SIDES), rng.uniform(*_ASPECTS)
    width, height = round(side * aspect**0.5), round(side / aspect**0.5)
    radius = RADIUS * (width * height) ** 0.5
    centres = _centres(rng, width, height, radius, count)
    x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    inside = np.zeros((height, width), bool)
    for across, down in centres:
        inside |= (x - across) ** 2 + (y - down) ** 2 <= radius**2
    noise = np.random.default_rng(rng.randrange(2**32)).normal(0, 6, (height, width, 3))
    shade = [rng.randint(100, 150)] * 3
    tint = [channel + rng.randint(-20, 20) for channel in COLORS[color]]
    pixels = np.where(inside[..., None], tint, shade) + noise
    return Dots(pixels.clip(0, 255).astype(np.uint8), color, count)


def _centres(
    rng: random.Random, width: int, height: int, radius: float, count: int
) -> list[tuple[float, float]]:
    """Return centres of dots that neither touch each other nor leave the picture."""
    found: list[tuple[float, float]] = []
    while len(found) < count:
        x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
        if all((x - a) ** 2 + (y - b) ** 2 > (2.3 * radius) ** 2 for a, b in found):
            found.append((x, y))
    return found


DOTS_PROMPTS = ("color?", "dots?")


def right_answer(picture: Dots, prompt: str) -> str:
    """Return the right answer to one of `DOTS_PROMPTS`."""
    return picture.color if prompt == "color?" else str(picture.count)


def questions_of(picture: Dots, rng: random.Random) -> tuple[ClosedQuestion, ...]:
    """Return closed questions about a picture; each has one right option."""
    counts = [str(each + 1) for each in range(MOST_DOTS)]
    others = [each for each in COLORS if each != picture.color]
    listed = [picture.color, *rng.sample(others, 3)]
    rng.shuffle(listed)
    named = picture.color if rng.random() < 0.5 else rng.choice(others)
    return (
        choice("color?", listed, [picture.color]),
        choice("dots?", counts, [str(picture.count)]),
        predicate(f"{named}?", [named == picture.color]),
    )
