"""Runs exported graphs directly, and compares them with transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from transformers import DynamicCache

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.graphs.names import SLOTS
from canvasrt.runtime.body_inputs import expert_slots, past_in_octets
from tests.helpers.random_models import Graphs

TOLERANCE = 1e-4


def past_feeds(graphs: Graphs, body: dict[str, Any], cache: list[tuple], position: int) -> dict:
    """Return the cache as inputs of the graph: the last window − 1 tokens for sliding layers, and all tokens for full
    layers."""
    feeds = {}
    for index in body["layers"]:
        layer = graphs.config.layers[index]
        key, value = cache[index]
        kept = (
            min(position, graphs.config.sliding_window - 1) if layer.kind == "sliding" else position
        )
        feeds[f"past_key_{index}"] = past_in_octets(key[:, :, position - kept : position], 2)
        feeds[f"past_value_{index}"] = past_in_octets(value[:, :, position - kept : position], 2)
        positions = np.arange(position - kept, position)
        known = np.tile(positions, (key.shape[0], 1))
        feeds[f"past_positions_{layer.kind}"] = past_in_octets(known, 1, empty=-1)
    return feeds


def run_body(
    graphs: Graphs,
    hidden: np.ndarray,
    cache: list[tuple],
    position: int,
    causal: bool,
    groups: np.ndarray | None = None,
    capacity: int | None = None,
    shared: bool = False,
) -> tuple[np.ndarray, list[tuple], list[int]]:
    """Run all body segments once; return the hidden states, the new keys and values, and the loads."""
    batch, length, _ = hidden.shape
    new, loads = [], []
    for body in graphs.bodies:
        out = graphs.run(
            body["name"],
            {
                "hidden": hidden,
                "positions": np.tile(np.arange(position, position + length), (batch, 1)),
                "groups": np.full((batch, length), -1) if groups is None else groups,
                "causal": np.full(batch, causal),
                **expert_slots(capacity or batch * length, graphs.config.num_experts),
                **(shared_queue(graphs, batch * length) if shared else {}),
                **past_feeds(graphs, body, cache, position),
            },
        )
        hidden = out["hidden_out"]
        loads += out["load"].tolist()
        new += [(out[f"new_key_{i}"], out[f"new_value_{i}"]) for i in body["layers"]]
    return hidden, new, loads


def shared_queue(graphs: Graphs, tokens: int) -> dict[str, np.ndarray]:
    """Return the inputs with which the first product of every expert takes all tokens."""
    return {"gate_slots": np.arange(tokens), "gate_queues": np.array([graphs.config.num_experts])}


def empty_cache(graphs: Graphs, batch: int) -> list[tuple]:
    zeros = [
        np.zeros((batch, layer.num_kv_heads, 0, layer.head_dim), np.float32)
        for layer in graphs.config.layers
    ]
    return [(each, each) for each in zeros]


def encode(graphs: Graphs, tokens: np.ndarray, cache: list[tuple], position: int) -> list[tuple]:
    """Encode `tokens` from `position` on; return the cache with the new keys and values."""
    embedded = graphs.table[tokens] * np.float32(graphs.config.hidden_size**0.5)
    _, new, _ = run_body(graphs, embedded, cache, position, causal=True)
    return [
        tuple(np.concatenate([old, fresh], 2) for old, fresh in zip(*pair, strict=True))
        for pair in zip(cache, new, strict=True)
    ]


def first_hidden(graphs: Graphs, canvas: np.ndarray) -> np.ndarray:
    embedded = graphs.table[canvas] * np.float32(graphs.config.hidden_size**0.5)
    scale = np.sqrt(np.square(embedded).mean(-1, keepdims=True) + graphs.config.rms_norm_eps)
    return embedded / scale


def assert_close(ours: np.ndarray, theirs: torch.Tensor | np.ndarray) -> None:
    np.testing.assert_allclose(ours, np.asarray(theirs), rtol=0, atol=TOLERANCE)


def assert_cache(graphs: Graphs, cache: list[tuple], reference: DynamicCache) -> None:
    for (key, value), layer in zip(cache, reference.layers, strict=True):
        held = layer.keys.shape[2]
        assert_close(key[:, :, key.shape[2] - held :], layer.keys)
        assert_close(value[:, :, value.shape[2] - held :], layer.values)


def random_feeds(
    config: ModelConfig, rows: int, length: int, past: int, padding: int = 0
) -> dict[str, np.ndarray]:
    """Return random inputs of a body graph with all layers. The last row ends with `padding` empty positions."""
    rng = np.random.default_rng(length)
    positions = np.tile(np.arange(past, past + length), (rows, 1))
    if padding:
        positions[-1, -padding:] = -1
    known = np.tile(np.arange(past), (rows, 1))
    values: dict[str, np.ndarray] = {
        "hidden": rng.standard_normal((rows, length, config.hidden_size)).astype(np.float32),
        "positions": positions,
        "groups": np.full((rows, length), -1),
        "causal": np.ones(rows, bool),
        **expert_slots(rows * length, config.num_experts),
        "past_positions_sliding": past_in_octets(known, 1, empty=-1),
        "past_positions_full": past_in_octets(known, 1, empty=-1),
    }
    for i, layer in enumerate(config.layers):
        shape = (rows, layer.num_kv_heads, past, layer.head_dim)
        values[f"past_key_{i}"] = past_in_octets(rng.standard_normal(shape).astype(np.float32), 2)
        values[f"past_value_{i}"] = past_in_octets(rng.standard_normal(shape).astype(np.float32), 2)
    return values


def without_slots(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return these inputs without those that a graph with split experts lacks."""
    return {name: each for name, each in feeds.items() if name not in SLOTS}


def head_feeds(
    config: ModelConfig, rows: int, length: int, scale: float = 1.0
) -> dict[str, np.ndarray]:
    """Return random inputs of a head's graph. `scale` multiplies the hidden states."""
    rng = np.random.default_rng(1)
    return {
        "hidden": rng.standard_normal((rows, length, config.hidden_size), np.float32) * scale,
        "temperature": np.linspace(0.5, 0.8, rows, dtype=np.float32),
        "entropy_bound": np.linspace(0.1, 3.0, rows, dtype=np.float32),
        "uniforms": rng.random((rows, length), np.float32),
        "noise": rng.integers(0, config.vocab_size, (rows, length)),
    }


def run_graph(
    model: Path | onnx.ModelProto, feeds: Mapping[str, np.ndarray], *wanted: str
) -> dict[str, np.ndarray]:
    """Run a graph in ONNX Runtime; return the wanted outputs, or all outputs. Feeds that the graph does not have are
    ignored."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    given = model if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    names = wanted or [each.name for each in session.get_outputs()]
    taken = {each.name: feeds[each.name] for each in session.get_inputs()}
    return dict(zip(names, session.run(list(names), taken), strict=True))


def show(model: onnx.ModelProto, file: Path, nodes: Iterable[onnx.NodeProto]) -> None:
    """Write a float32 graph that also outputs the first input and output of some nodes."""
    known = {output.name for output in model.graph.output}
    values = (value for node in nodes for value in (node.input[0], node.output[0]))
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        for name in dict.fromkeys(values)
        if name not in known
    )
    onnx.save(model, file)
