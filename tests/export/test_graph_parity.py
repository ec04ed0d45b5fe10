"""Every graph compared with transformers, for several shapes: keys, values, logits and the sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
)

from canvasrt.runtime.body_inputs import expert_slots
from tests.helpers.graph_runs import (
    assert_cache,
    assert_close,
    empty_cache,
    encode,
    first_hidden,
    run_body,
)
from tests.helpers.random_models import SHAPES


def lengths(shape: str) -> list[int]:
    """Return lengths of prompts around the sliding window; if it is long, shorter lengths. By default, only the first
    is tested."""
    window = SHAPES[shape].get("sliding_window", 64)
    if window >= 100:
        return [40, 7]
    border = [window - 1, window, window + 1] if shape == "tiny" else [window]
    return [2 * window + 5, *border]


CASES = [
    pytest.param(
        shape, length, marks=[pytest.mark.acceptance] if number and shape != "tiny" else []
    )
    for shape in SHAPES
    for number, length in enumerate(lengths(shape))
]


@pytest.mark.parametrize(("shape", "length"), CASES)
@torch.no_grad()
def test_several_blocks(exported: Any, shape: str, length: int) -> None:
    """Encodes a prompt, then denoises blocks with self-conditioning, committing each before the next."""
    model, graphs = exported(shape)
    config = graphs.config
    random = np.random.default_rng(length)
    batch, canvas_length = 2, config.canvas_length
    tokens = random.integers(6, config.vocab_size, (batch, length))
    reference_cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache, position = empty_cache(graphs, batch), 0
    argmaxes, kept = set(), set()
    for _block in range(3):
        model.model.encoder(
            input_ids=torch.from_numpy(tokens),
            past_key_values=reference_cache,
            position_ids=torch.arange(position, position + tokens.shape[1])[None],
            attention_mask=torch.ones(batch, position + tokens.shape[1], dtype=torch.bool),
        )
        cache = encode(graphs, tokens, cache, position)
        position += tokens.shape[1]
        assert_cache(graphs, cache, reference_cache)

        canvas = random.integers(0, config.vocab_size, (batch, canvas_length))
        hidden, signal = first_hidden(graphs, canvas), None
        for temperature in (0.8, 0.6):
            expected = model(
                decoder_input_ids=torch.from_numpy(canvas),
                past_key_values=reference_cache,
                self_conditioning_logits=signal,
                decoder_position_ids=torch.arange(position, position + canvas_length)[None],
                decoder_attention_mask=torch.ones(
                    batch, position + canvas_length, dtype=torch.bool
                ),
            ).logits
            body, _, _ = run_body(graphs, hidden, cache, position, causal=False)
            uniforms = random.random((batch, canvas_length), np.float32)
            noise = random.integers(0, config.vocab_size, (batch, canvas_length))
            out = graphs.run(
                "head",
                {
                    "hidden": body,
                    "temperature": np.full(batch, temperature, np.float32),
                    "entropy_bound": np.array([0.5, 8.0], np.float32),
                    "uniforms": uniforms,
                    "noise": noise,
                },
            )
            assert_close(out["logits"] * temperature, expected)
            signal = expected / temperature
            check_sampler(out, signal, noise)
            canvas, hidden = out["canvas"], out["next_hidden"]
            argmaxes.update(out["argmax"].ravel().tolist())
            kept.update(out["accepted"].sum(-1).tolist())
        tokens = out["argmax"]
    assert len(argmaxes) > 10, "the model is too sure of one token to tell right from wrong"
    assert len(kept) > 2, "acceptance does not vary"


def check_sampler(out: dict[str, np.ndarray], logits: torch.Tensor, noise: np.ndarray) -> None:
    """Compare argmax, entropy, acceptance and renoising with what the reference computes from its own logits."""
    assert (out["argmax"] == logits.argmax(-1).numpy()).all()
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert_close(out["entropy"], entropy)
    for row, bound in enumerate((0.5, 8.0)):
        sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(bound), 0, 0, 1)
        one = slice(row, row + 1)
        canvas = torch.from_numpy(out["canvas"][one])
        sampler.accept_canvas(canvas, canvas, logits[one], 1)
        accepted = sampler.accepted_token_mask.numpy()
        assert (out["accepted"][one] == accepted).all()
        assert (out["canvas"][one][~accepted] == noise[one][~accepted]).all()


@pytest.mark.parametrize("shape", ["tiny", "odd"])
def test_capacity(exported: Any, shape: str) -> None:
    """Every capacity that holds the load gives the same numbers. With a smaller capacity, the load is still
    reported."""
    _, graphs = exported(shape)
    config = graphs.config
    tokens = np.random.default_rng(0).integers(6, config.vocab_size, (2, 20))
    embedded = graphs.table[tokens] * np.float32(config.hidden_size**0.5)
    cache = empty_cache(graphs, 2)
    whole, _, loads = run_body(graphs, embedded, cache, 0, causal=True)
    need = max(loads)
    assert need < 40, "some expert is left alone by some token"
    exact, _, same = run_body(graphs, embedded, cache, 0, causal=True, capacity=need)
    assert_close(exact, whole)
    assert same == loads
    _, _, short = run_body(graphs, embedded, cache, 0, causal=True, capacity=1)
    # Only the first layer's load is correct: later layers route wrong states.
    assert short[0] == loads[0] > 1


def test_padding_changes_nothing(exported: Any) -> None:
    """Neither padding after a row's tokens nor empty cache slots change the row's numbers."""
    _, graphs = exported("tiny")
    config = graphs.config
    random = np.random.default_rng(3)
    tokens = random.integers(6, config.vocab_size, (1, 30))
    embedded = graphs.table[tokens] * np.float32(config.hidden_size**0.5)
    _, new, loads = run_body(graphs, embedded, empty_cache(graphs, 1), 0, causal=True)
    body = graphs.bodies[0]
    padded = np.concatenate([embedded, random.standard_normal((1, 9, config.hidden_size))], 1)
    positions = np.concatenate([np.arange(30), np.full(9, -1)])[None]
    feeds = {
        "hidden": padded.astype(np.float32),
        "positions": positions,
        "groups": np.full((1, 39), -1),
        "causal": np.array([True]),
        **expert_slots(30, config.num_experts),
    }
    for index in body["layers"]:
        layer = config.layers[index]
        junk = random.standard_normal((1, layer.num_kv_heads, 2, 8, layer.head_dim))
        feeds[f"past_positions_{layer.kind}"] = np.full((1, 2, 8), -1)
        feeds[f"past_key_{index}"] = feeds[f"past_value_{index}"] = junk.astype(np.float32)
    out = graphs.run(body["name"], feeds)
    for index in body["layers"]:
        assert_close(out[f"new_key_{index}"][:, :, :30], new[index][0])
        assert_close(out[f"new_value_{index}"][:, :, :30], new[index][1])
    assert out["load"].tolist() == loads[: len(body["layers"])]
    assert np.isfinite(out["hidden_out"]).all()


@pytest.mark.parametrize("shape", ["tiny", "odd", "wide_heads"])
def test_all_tokens_may_feed_every_expert(exported: Any, shape: str) -> None:
    """A first product of every expert with all tokens gives the same result as with each expert's own tokens."""
    _, graphs = exported(shape)
    config = graphs.config
    hidden = np.random.default_rng(5).standard_normal((2, 16, config.hidden_size))
    hidden = hidden.astype(np.float32)
    cache = empty_cache(graphs, 2)
    own, new, loads = run_body(graphs, hidden, cache, 0, causal=False)
    shared, new_shared, loads_shared = run_body(graphs, hidden, cache, 0, causal=False, shared=True)
    assert loads == loads_shared
    assert_close(shared, own)
    assert_close(new_shared[-1][0], new[-1][0])
    # Even if the first product takes all tokens, the second takes only the slots.
    few = max(loads)
    fitting, _, _ = run_body(graphs, hidden, cache, 0, causal=False, capacity=few, shared=True)
    assert_close(fitting, own)
    if few > 1:
        short, _, over = run_body(
            graphs, hidden, cache, 0, causal=False, capacity=few - 1, shared=True
        )
        assert max(over) >= few
        assert np.abs(short - own).max() > 1e-3
