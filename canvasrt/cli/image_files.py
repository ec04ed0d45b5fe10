"""The image options of commands."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from canvasrt.cli.options import option
from canvasrt.errors import CanvasError, UsageError

if TYPE_CHECKING:
    from canvasrt.runtime.model import Model
    from canvasrt.runtime.pictures import Picture

Images = Annotated[
    list[Path] | None,
    option("--image", "FILE", "An image that stands before the text; may be given several times."),
]
ImageTokens = Annotated[
    int,
    typer.Option(
        "--image-tokens", metavar="N", help="The most tokens that an image takes: 70, 140 or 280."
    ),
]


def read_images(images: Sequence[Path], budget: int) -> list[bytes]:
    """Read the files of --image. Raises UsageError for an unsupported budget, CanvasError for an unreadable file."""
    from canvasrt.runtime.pictures import BUDGETS

    if budget not in BUDGETS:
        listed = ", ".join(map(str, BUDGETS))
        raise UsageError(f"--image-tokens is {budget}", f"give one of {listed}")
    try:
        return [path.read_bytes() for path in images]
    except OSError as error:
        raise CanvasError(f"cannot read an image: {error}", "give readable files") from None


def pictures_of(files: Sequence[bytes], budget: int, model: Model) -> list[Picture]:
    """Return images as patches for the vision tower. Raises CanvasError if the model has no such tower."""
    from canvasrt.runtime.pictures import read_pictures

    if not files:
        return []
    model.check_vision()
    return read_pictures(list(files), model.config.vision or {}, [budget] * len(files))


def data_url(path: Path, content: bytes) -> str:
    """Return an image as a data URL for OpenAI's API."""
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
