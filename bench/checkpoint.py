"""Writes a checkpoint of a real shape with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.synthetic import SHAPES, WEIGHT_FORMATS, write_random_checkpoint

Shape = Literal[tuple(SHAPES)]  # type: ignore[valid-type]
Format = Literal[tuple(WEIGHT_FORMATS)]  # type: ignore[valid-type]


def measure(
    folder: Annotated[Path, typer.Option("-o", "--out", help="The folder to write.")],
    shape: Shape = "300m",
    layers: Annotated[int | None, typer.Option(help="Default: the shape's own number.")] = None,
    format: Format = "bf16",
    seed: int = 0,
) -> None:
    """Write a random checkpoint in the Hugging Face layout."""
    write_random_checkpoint(folder, shape, layers, seed, format)
