"""The pixels of images and the tokens of prompts equal those of transformers' processor."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from canvasrt.errors import CanvasError
from canvasrt.runtime.pictures import BUDGETS, read_picture, read_pictures
from tests.helpers.pictures import VISION, noise, png

SIZES = [
    (48, 48),
    (640, 480),
    (333, 1000),
    (17, 19),
    (768, 768),
    (2000, 90),
    (60, 3000),
    (816, 672),
]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_are_the_references(size: tuple[int, int], budget: int) -> None:
    image = noise(*size)
    expected = Gemma4ImageProcessorPil(max_soft_tokens=budget)(image, return_tensors="np")
    picture = read_picture(png(image), VISION, budget)
    count = len(picture.pixels)
    assert picture.tokens == expected["num_soft_tokens_per_image"][0] <= budget
    assert np.abs(picture.pixels - expected["pixel_values"][0][:count]).max() < 1e-5
    assert np.array_equal(picture.positions, expected["image_position_ids"][0][:count])
    assert (expected["image_position_ids"][0][count:] == -1).all()
    assert picture.pixels.dtype == np.float32


def test_other_kinds_of_files() -> None:
    """In each format, images may be grey, transparent, rotated or animated."""
    image = noise(90, 60)
    expected = read_picture(png(image), VISION)
    for kind in ("BMP", "GIF", "WEBP", "JPEG"):
        file = io.BytesIO()
        image.save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
        picture = read_picture(file.getvalue(), VISION)
        assert picture.tokens == expected.tokens
        if kind in ("BMP", "WEBP"):
            assert np.array_equal(picture.pixels, expected.pixels)
    grey = read_picture(png(image.convert("L")), VISION).pixels.reshape(-1, 256, 3)
    assert np.array_equal(grey[..., 0], grey[..., 2])
    assert np.array_equal(read_picture(png(image.convert("RGBA")), VISION).pixels, expected.pixels)
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(turned, "PNG", exif=exif)
    assert np.array_equal(read_picture(turned.getvalue(), VISION).pixels, expected.pixels)


BAD: dict[str, tuple[bytes, int, str]] = {
    "nothing": (b"", 280, "unsupported image format"),
    "text": (b"hello" * 100, 280, "unsupported image format"),
    "cut short": (png(noise(200, 200))[:-900], 280, "cannot be read"),
    "a budget": (png(noise(20, 20)), 100, "image_tokens is 100"),
}


@pytest.mark.parametrize(("data", "budget", "message"), BAD.values(), ids=BAD)
def test_what_is_no_image_is_refused(data: bytes, budget: int, message: str) -> None:
    with pytest.raises(CanvasError, match=message):
        read_picture(data, VISION, budget)


def test_more_patches_than_the_tower_has_positions_are_refused() -> None:
    narrow, small = png(noise(2000, 90)), {**VISION, "position_embedding_size": 66}
    most = int(read_picture(narrow, VISION).positions.max()) + 1
    assert most > 66
    with pytest.raises(CanvasError, match=f"would have {most} patches in a row.* only 66 pos"):
        read_picture(narrow, small)
    assert read_picture(png(noise(90, 90)), small).positions.max() < 66
    exact = {**VISION, "position_embedding_size": most}
    assert len(read_picture(narrow, exact).pixels)


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has a few kilobytes, but would take gigabytes when decoded."""
    file = io.BytesIO()
    Image.new("1", (9_000, 9_000)).save(file, "PNG")
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(CanvasError, match="9000 × 9000"):
        read_picture(file.getvalue(), VISION)


def test_the_pixels_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    Image.new("1", (5_000, 5_000)).save(file, "PNG")
    three = [file.getvalue()] * 3
    assert len(read_pictures(three[:2], VISION, [70, 70])) == 2
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("one was decoded"))
    with pytest.raises(CanvasError, match="3 images have 75000000 pixels together"):
        read_pictures(three, VISION, [70] * 3)
