"""Preprocesses images for the vision tower: resizes them to fit a budget of soft tokens, and cuts them into patches.

Follows `transformers.models.gemma4.image_processing_pil_gemma4`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.defaults import SOFT_TOKENS
from canvasrt.errors import CanvasError
from canvasrt.extras import require

# An image's possible budgets of soft tokens. The checkpoint supports larger ones, but engines do not.
BUDGETS = (70, 140, SOFT_TOKENS)
MAX_PIXELS = 64_000_000  # maximum pixels of an image file; decoding takes three bytes per pixel
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


@dataclass(frozen=True, eq=False)
class Picture:
    """One image as patches. `tokens` is the number of its soft tokens."""

    pixels: np.ndarray  # float32 [patches, 3 · patch²] in [0, 1]
    positions: np.ndarray  # int64 [patches, 2], (x, y) of each patch
    tokens: int
    digest: bytes  # hash of the resized image, which identifies the picture


def read_picture(data: bytes, vision: Mapping[str, Any], budget: int = SOFT_TOKENS) -> Picture:
    """Return an image file as patches. `vision` is the tower's configuration.

    Reads the first frame of animations. Raises CanvasError for a file that is not an image, or whose image is too large
    or too narrow.
    """
    if budget not in BUDGETS:
        raise CanvasError(
            f"image_tokens is {budget}", f"give one of {', '.join(map(str, BUDGETS))}"
        )
    return cut_patches(_decode(data), vision, budget)


def read_pictures(
    files: Sequence[bytes], vision: Mapping[str, Any], budgets: Sequence[int]
) -> list[Picture]:
    """Return a request's image files as patches. `budgets` holds one budget per file. Raises CanvasError as
    `read_picture` does, or if the files together have too many pixels."""
    check_pixels(files)
    return [read_picture(file, vision, each) for file, each in zip(files, budgets, strict=True)]


def check_pixels(files: Sequence[bytes]) -> None:
    """Raise CanvasError if a request's image files together have too many pixels, or if one is not an image."""
    total = sum(_size(file) for file in files)
    if total > MAX_PIXELS:
        raise CanvasError(
            f"{len(files)} images have {total} pixels together",
            f"send at most {MAX_PIXELS // 10**6} million pixels in one request",
        )


def cut_patches(pixels: np.ndarray, vision: Mapping[str, Any], budget: int) -> Picture:
    """Resize an image, uint8 `[height, width, 3]`, and cut it into patches.

    Raises CanvasError if a row or column would have more patches than the tower has positions.
    """
    image = require("PIL.Image", "serve")
    patch, pool = vision["patch_size"], vision["pooling_kernel_size"]
    height, width = target_size(pixels.shape[0], pixels.shape[1], patch, pool, budget)
    longest, most = max(height, width) // patch, vision["position_embedding_size"]
    if longest > most:
        raise CanvasError(
            f"an image of {pixels.shape[1]} × {pixels.shape[0]} pixels would have {longest} patches"
            f" in a row, but the model's vision tower has only {most} positions",
            "send an image that is closer to a square, or give fewer image_tokens",
        )
    if (height, width) != pixels.shape[:2]:
        scaled = image.fromarray(pixels).resize((width, height), image.Resampling.BICUBIC)
        pixels = np.asarray(scaled)
    down, across = height // patch, width // patch
    cells = pixels.reshape(down, patch, across, patch, 3).transpose(0, 2, 1, 3, 4)
    values = (cells.reshape(down * across, -1).astype(np.float64) * (1 / 255)).astype(np.float32)
    x, y = np.meshgrid(np.arange(across), np.arange(down))
    positions = np.stack([x, y], -1).reshape(-1, 2).astype(np.int64)
    size = np.array([height, width], "<i8").tobytes()
    digest = hashlib.sha256(size + np.ascontiguousarray(pixels).tobytes()).digest()
    return Picture(values, positions, down * across // pool**2, digest)


def target_size(height: int, width: int, patch: int, pool: int, budget: int) -> tuple[int, int]:
    """Return the largest height and width that roughly keep these proportions and need at most `budget` soft tokens.
    Both are multiples of `patch · pool`. Raises CanvasError if no such size exists."""
    side = patch * pool
    factor = math.sqrt(budget * side**2 / (height * width))
    rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    if not rows and columns:
        rows, columns = 1, min(width // height, budget)
    elif rows and not columns:
        rows, columns = min(height // width, budget), 1
    if not rows or not columns or rows * columns > budget:
        raise CanvasError(
            f"an image of {width} × {height} pixels is too narrow for its length",
            "send an image that is closer to a square",
        )
    return rows * side, columns * side


def check_places(ids: Sequence[int], images: int, config: ModelConfig) -> None:
    """Raise CanvasError unless a prompt has one image token per image."""
    places = sum(id == config.image_token_id for id in ids)
    if places != images:
        raise CanvasError(
            f"messages have {images} images, but the chat template wrote {places}",
            "send images only with messages, and to a checkpoint whose template supports images",
        )


def insert(ids: Sequence[int], pictures: Sequence[Picture], config: ModelConfig) -> list[int]:
    """Repeat every image token of a prompt once per soft token of its picture, and put each run between the tokens that
    begin and end an image.

    Raises CanvasError if the numbers of image tokens and pictures differ: some templates do not support images.
    """
    check_places(ids, len(pictures), config)
    expanded: list[int] = []
    left = iter(pictures)
    for id in ids:
        if id != config.image_token_id:
            expanded.append(id)
            continue
        around = (config.boi_token_id, config.eoi_token_id)
        begin, end = ([each] if each is not None else [] for each in around)
        expanded += [*begin, *[id] * next(left).tokens, *end]
    return expanded


def groups_of(
    ids: Sequence[int] | np.ndarray, pictures: Sequence[Picture], config: ModelConfig
) -> np.ndarray:
    """Return every token's image number, or -1 for text: int64 `[tokens]`.

    Raises CanvasError unless the prompt has one run of image tokens per picture, in order, and each run has as many
    tokens as its picture has soft tokens.
    """
    groups = np.full(len(ids), -1, np.int64)
    if not pictures:
        return groups
    inside = np.asarray(ids) == config.image_token_id
    begins = np.flatnonzero(inside & ~np.concatenate([[False], inside[:-1]]))
    lengths = [int(np.argmin(np.append(inside[begin:], False))) for begin in begins]
    if lengths != [each.tokens for each in pictures]:
        raise CanvasError(
            f"the prompt has runs of {lengths} image tokens, but the images have "
            f"{[each.tokens for each in pictures]}",
            "give as many image tokens as each image has soft tokens",
        )
    for number, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        groups[begin : begin + length] = number
    return groups


def uncut(groups: np.ndarray, size: int, most: int) -> int:
    """Return the size of a prompt's next chunk: `size` if that cuts no image. Otherwise the chunk ends after the image
    if the chunk then has at most `most` tokens, or else before the image. An image of more than `most` tokens is one
    chunk. `groups` are the image numbers of the prompt's remaining tokens."""
    if len(groups) <= size or groups[size] < 0 or groups[size] != groups[size - 1]:
        return min(len(groups), size)
    (inside,) = np.nonzero(groups == groups[size])
    first, end = int(inside[0]), int(inside[-1]) + 1
    return end if end <= most or not first else first


def see_groups(
    groups: np.ndarray, pictures: Sequence[Picture], see: Callable[[Picture], np.ndarray]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return `groups` (the image numbers of the tokens to encode) and the soft tokens of these images, concatenated.
    Both are None if no token belongs to an image."""
    seen = [see(pictures[n]) for n in np.unique(groups[groups >= 0])]
    return (groups, np.concatenate(seen)) if seen else (None, None)


def _size(data: bytes) -> int:
    """Return the number of pixels that an image file's header states."""
    with _opened(data) as image:
        return int(image.size[0] * image.size[1])


def _decode(data: bytes) -> np.ndarray:
    """Return an image file's pixels, uint8 `[height, width, 3]`, rotated as its EXIF orientation says."""
    ops = require("PIL.ImageOps", "serve")
    with _opened(data) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise CanvasError(
                f"an image has {width} × {height} pixels",
                f"send an image of at most {MAX_PIXELS // 10**6} million pixels",
            )
        return np.asarray(ops.exif_transpose(image).convert("RGB"))


@contextlib.contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """Open an image file. Raises CanvasError if reading it fails, here or later inside the `with` block."""
    image = require("PIL.Image", "serve")
    hint = f"send a {', '.join(PICTURE_FORMATS[:-1])} or {PICTURE_FORMATS[-1]} file"
    try:
        with image.open(io.BytesIO(data), formats=PICTURE_FORMATS) as opened:
            yield opened
    except CanvasError:
        raise
    except image.UnidentifiedImageError as error:
        raise CanvasError("unsupported image format", hint) from error
    except Exception as error:  # decoders can raise anything for a damaged file
        raise CanvasError(f"an image cannot be read: {error}", hint) from error
