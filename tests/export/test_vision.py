"""Images compared with transformers: the soft tokens of the vision tower, and attention in both directions inside an
image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from canvasrt.export.graphs import export_graphs
from tests.helpers.graph_runs import assert_cache, assert_close, empty_cache, run_body
from tests.helpers.random_models import SHAPES, Graphs, random_model

PATCH, POOL = 4, 3
# Optional features of a tower; tests/runtime/test_images.py tests a tower without them.
TOWER = {"use_clipped_linears": True, "standardize": True, "num_key_value_heads": 1}


def image(width: int, height: int, slots: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the patches of a random image of `width` × `height` patches, padded to `slots` patches, and their
    positions."""
    random = np.random.default_rng(seed)
    pixels = np.zeros((slots, 3 * PATCH * PATCH), np.float32)
    positions = np.full((slots, 2), -1)
    count = width * height
    pixels[:count] = random.random((count, 3 * PATCH * PATCH), np.float32)
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    positions[:count] = np.stack([across.ravel(), down.ravel()], -1)
    return pixels, positions


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> tuple[Any, Graphs]:
    """A model with the tower above, and its graphs."""
    folder: Path = tmp_path_factory.mktemp("vision")
    model = random_model({**SHAPES["odd"], "num_hidden_layers": 2}, vision=TOWER)
    model.save_pretrained(folder / "checkpoint")
    return model, Graphs(export_graphs(folder / "checkpoint", folder / "graphs"))


@torch.no_grad()
def test_soft_tokens(pair: tuple[Any, Graphs]) -> None:
    """Runs two images of different shapes, padded, in one call."""
    model, graphs = pair
    images = [image(6, 9, 63, 0), image(9, 6, 63, 1)]
    pixels, positions = (np.stack(each) for each in zip(*images, strict=True))
    out = graphs.run("vision", {"pixel_values": pixels, "pixel_positions": positions})
    expected = model.model.encoder.get_image_features(
        torch.from_numpy(pixels), torch.from_numpy(positions), return_dict=True
    ).pooler_output
    assert out["valid"].sum(-1).tolist() == [6, 6]
    assert_close(out["features"][out["valid"]], expected)


@torch.no_grad()
def test_encoder_sees_an_image_both_ways(pair: tuple[Any, Graphs]) -> None:
    """The prompt is text, an image with more tokens than the sliding window, and text. Keys and values equal those of
    transformers."""
    model, graphs = pair
    config = graphs.config
    pixels, positions = image(15, 12, 180, 2)
    out = graphs.run("vision", {"pixel_values": pixels[None], "pixel_positions": positions[None]})
    features = out["features"][out["valid"]]
    assert len(features) == 20 > config.sliding_window
    random = np.random.default_rng(0)
    text = random.integers(6, config.vocab_size, 14)
    tokens = np.concatenate([text[:5], np.full(20, config.image_token_id), text[5:]])
    is_image = tokens == config.image_token_id

    reference = DynamicCache(config=model.config.get_text_config(decoder=True))
    masks = model.model.encoder.create_masks_for_generate(
        config=model.config,
        inputs_embeds=torch.empty(1, len(tokens), 0),
        attention_mask=None,
        past_key_values=reference,
        position_ids=torch.arange(len(tokens))[None],
        mm_token_type_ids=torch.from_numpy(is_image.astype(np.int64))[None],
    )
    model.model.encoder(
        input_ids=torch.from_numpy(tokens)[None],
        pixel_values=torch.from_numpy(pixels)[None],
        image_position_ids=torch.from_numpy(positions)[None],
        attention_mask=masks,
        past_key_values=reference,
    )

    embedded = graphs.table[tokens] * np.float32(config.hidden_size**0.5)
    embedded[is_image] = features
    groups = np.where(is_image, 0, -1)[None]
    both_ways, new, _ = run_body(
        graphs, embedded[None], empty_cache(graphs, 1), 0, causal=True, groups=groups
    )
    assert_cache(graphs, new, reference)
    one_way, _, _ = run_body(graphs, embedded[None], empty_cache(graphs, 1), 0, causal=True)
    assert np.abs(both_ways - one_way).max() > 1e-2
