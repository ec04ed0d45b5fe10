"""Writes a checkpoint of a real shape with random weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.synthetic import SHAPES, WEIGHT_FORMATS, write_random_checkpoint
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.description import describe

Shape = Literal[tuple(SHAPES)]  # type: ignore[valid-type]
Format = Literal[tuple(WEIGHT_FORMATS)]  # type: ignore[valid-type]


def measure(
    folder: Annotated[Path, typer.Option("-o", "--out", help="The folder to write.")],
    shape: Shape = "300m",
    layers: Annotated[int | None, typer.Option(help="Default: the shape's own number.")] = None,
    format: Format = "bf16",
) -> None:
    """Write a random checkpoint in the Hugging Face layout."""
    write_random_checkpoint(folder, shape, layers, format=format)


def write_apart(folder: Path, shape: Shape, layers: int | None) -> ModelConfig:
    """Write a checkpoint in a separate process, so that all of its memory is freed afterwards."""
    options = ["--shape", shape, *(["--layers", str(layers)] if layers else [])]
    subprocess.run(
        [sys.executable, "-m", "bench", "checkpoint", "-o", str(folder), *options], check=True
    )
    return describe(folder).model
