"""Random images, and the configuration of a vision tower."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

# The released sizes: patches of 16 × 16 pixels, and 3 × 3 patches per soft token.
VISION = {"patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10_240}


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    """Return the bytes of an image as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
