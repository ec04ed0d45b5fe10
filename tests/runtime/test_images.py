"""Generations from prompts with images equal the `generate` of transformers, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from canvasrt.errors import CanvasError
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.pictures import Picture, insert, read_picture, uncut
from canvasrt.runtime.request import Request, Result
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.pictures import noise, png
from tests.helpers.reference import Pair, ReferenceOutput

PARAMS = SamplingParams(
    max_new_tokens=64, max_denoising_steps=11, entropy_bound=1.0, confidence_threshold=1.0, seed=5
)
IMAGE = 510  # the tiny model's image token
# Lengths of the text around images, and the images. Some images have more soft tokens than the sliding window of 64.
SHAPES = {
    "one": ([20, 30], [noise(90, 70)]),
    "first": ([1, 5], [noise(40, 160, 1)]),
    "two": ([10, 3, 90], [noise(64, 64, 2), noise(200, 30, 3)]),
    "touching": ([4, 0, 8], [noise(30, 50, 4), noise(50, 30, 5)]),
}


def prompt_of(pair: Pair, texts: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """Return a prompt with random text of these lengths and the images between."""
    random = np.random.default_rng(sum(texts))
    ids: list[int] = []
    for number, count in enumerate(texts):
        ids += random.integers(6, 500, count).tolist()
        ids += [IMAGE] if number < len(pictures) else []
    return insert(ids, pictures, pair.model.config)


def expected(
    pair: Pair, prompt: list[int], images: list[Image.Image], params: SamplingParams
) -> ReferenceOutput:
    seen = Gemma4ImageProcessorPil(max_soft_tokens=70)(images, return_tensors="pt")
    inputs = {
        "pixel_values": seen["pixel_values"].float(),
        "image_position_ids": seen["image_position_ids"],
        "mm_token_type_ids": torch.tensor([[int(id == IMAGE) for id in prompt]]),
    }
    return pair.reference.generate([prompt], [params], **inputs)


def ours(
    model: Model, prompt: list[int], pictures: Sequence[Picture], params: SamplingParams
) -> Result:
    (result,) = Generator(model).run([Request(prompt, params, pictures)])
    return result


@pytest.fixture(params=SHAPES)
def case(request: pytest.FixtureRequest, tiny: Pair):
    texts, images = SHAPES[request.param]
    vision = tiny.model.config.vision
    pictures = [read_picture(png(each), vision, 70) for each in images]
    return prompt_of(tiny, texts, pictures), images, pictures


def test_tokens_are_those_of_the_reference(tiny: Pair, case) -> None:
    prompt, images, pictures = case
    reference = expected(tiny, prompt, images, PARAMS)
    result = ours(tiny.model, prompt, pictures, PARAMS)
    reference.check([result])


def test_an_image_is_never_cut(tiny: Pair, case, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = 80
    prompt, _images, pictures = case
    whole = ours(tiny.model, prompt, pictures, PARAMS)
    monkeypatch.setattr(tiny.model, "prefill_chunk", chunk)
    passes = tiny.model.counters.encode_passes
    assert ours(tiny.model, prompt, pictures, PARAMS).token_ids == whole.token_ids
    assert tiny.model.counters.encode_passes - passes > 1 + (len(prompt) > chunk)


def test_where_chunks_end() -> None:
    groups = np.array([-1, -1, 0, 0, 0, -1, 1, 1, 1, 1])
    cuts = [uncut(groups, most, most) for most in range(1, 12)]
    assert cuts == [1, 2, 2, 2, 5, 6, 6, 6, 6, 10, 10]
    # A chunk includes an image only whole, if there is room.
    assert [uncut(groups, 3, most) for most in range(3, 7)] == [2, 2, 5, 5]
    assert [uncut(groups, 7, most) for most in (9, 10)] == [6, 10]
    # An image that is longer than a chunk is a separate chunk.
    assert uncut(groups[2:], 2, 2) == 3
    assert uncut(groups[6:], 2, 2) == 4
    assert uncut(groups[:0], 3, 3) == 0


def test_prompts_and_images_must_fit(tiny: Pair) -> None:
    picture = read_picture(png(noise(90, 70)), tiny.model.config.vision, 70)
    with pytest.raises(CanvasError, match="1 images, but the chat template wrote 0"):
        insert([5, 6], [picture], tiny.model.config)
    with pytest.raises(CanvasError, match="0 images, but the chat template wrote 1"):
        insert([5, IMAGE], [], tiny.model.config)
    with pytest.raises(CanvasError, match="runs of"):
        Generator(tiny.model).run([Request([5, IMAGE, IMAGE], PARAMS, [picture])])
    tiny.model.prefill_chunk, before = 32, tiny.model.prefill_chunk
    try:
        with pytest.raises(CanvasError, match="encode at most 32 together"):
            ours(tiny.model, prompt_of(tiny, [3, 3], [picture]), [picture], PARAMS)
    finally:
        tiny.model.prefill_chunk = before
