"""A loaded bundle: tokens to key-value caches (encode), and hidden states to the next canvas (denoise)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from canvasrt.bundle import Bundle, load_bundle
from canvasrt.errors import CanvasError
from canvasrt.model import ModelConfig, SamplerDefaults
from canvasrt.runtime.cache import PastBatch, RequestCache
from canvasrt.runtime.capacity import Capacity, rounded
from canvasrt.runtime.engine import Arrays, Backend, Segment

Input = TypeVar("Input")
Batch = TypeVar("Batch")
Output = TypeVar("Output")

PREFILL_CHUNK = 512
DEFAULT_MAX_CONTEXT = 32_768


@dataclass
class Row:
    """What the model keeps for one request: its cache, and what its experts' loads have been."""

    cache: RequestCache
    past: PastBatch = field(default_factory=PastBatch)
    capacities: dict[tuple[str, str], Capacity] = field(default_factory=dict)


@dataclass(frozen=True)
class EncodeInput:
    """Clean tokens to add to a request's cache."""

    row: Row
    tokens: np.ndarray  # int64 [n], n >= 1


@dataclass(frozen=True)
class DenoiseInput:
    """One request's part of a denoising pass."""

    row: Row
    hidden: np.ndarray  # float32 [canvas, hidden_size]
    temperature: np.float32
    entropy_bound: float
    uniforms: np.ndarray  # float32 [canvas]
    noise: np.ndarray  # int64 [canvas]


@dataclass(frozen=True)
class DenoiseOutput:
    """One request's result of a denoising pass; arrays of `[canvas]`, but for the hidden states."""

    canvas: np.ndarray  # int64, renoised
    argmax: np.ndarray  # int64
    entropy: np.ndarray  # float32, nats
    accepted: np.ndarray  # bool
    next_hidden: np.ndarray  # float32 [canvas, hidden_size]


@dataclass
class Counters:
    """What the passes of a model cost so far; seconds are wall time inside the passes."""

    encode_passes: int = 0
    encode_tokens: int = 0
    encode_seconds: float = 0.0
    denoise_passes: int = 0
    denoise_seconds: float = 0.0
    overflows: int = 0


@dataclass(frozen=True)
class Body:
    """One body segment and the layers that it holds."""

    segment: Segment
    layers: tuple[int, ...]


class Model:
    """The segments of one bundle, with the embedding table mapped from disk. Not thread-safe."""

    def __init__(
        self,
        config: ModelConfig,
        sampler: SamplerDefaults,
        bodies: Sequence[Body],
        head: Segment,
        table: np.ndarray,
        max_context: int,
        rows_apart: bool,
        max_workers: int = 1,
        bundle: Bundle | None = None,
    ) -> None:
        self.config = config
        self.sampler = sampler
        self.max_context = max_context
        self.counters = Counters()
        self.prefill_chunk = PREFILL_CHUNK
        self.bundle = bundle
        self._bodies = tuple(bodies)
        self._head = head
        self._table = table
        self.rows_apart = rows_apart
        self._scale = np.float32(config.hidden_size**0.5)
        self._past = PastBatch()
        self._pool = ThreadPoolExecutor(max_workers, "canvasrt") if max_workers > 1 else None
        self._counting = threading.Lock()

    @classmethod
    def load(
        cls,
        path: str | Path,
        threads: int | None = None,
        check: bool = True,
        backend: Backend | None = None,
    ) -> Model:
        """Loads a graph or engine bundle.

        threads: CPU threads (None: every core); check: verify the files' hashes first.
        Raises CanvasError for a bundle that is damaged, or that this machine cannot run.
        """
        bundle = load_bundle(path, kind=("graphs", "engines"), check=check)
        manifest = bundle.manifest
        backend = backend or _backend(manifest.target, threads, pass_work(manifest.model))
        opened = {
            entry["name"]: backend.open(entry["name"], bundle.file(entry["file"]))
            for entry in manifest.segments
            if entry["name"] != "vision"
        }
        bodies = [
            Body(opened[entry["name"]], tuple(entry["layers"]))
            for entry in manifest.segments
            if "layers" in entry
        ]
        config = manifest.model
        limit = min(config.max_position_embeddings, DEFAULT_MAX_CONTEXT)
        return cls(
            config,
            manifest.sampler,
            bodies,
            opened["head"],
            _map_table(bundle),
            int(manifest.options.get("max_context") or limit),
            backend.rows_apart,
            backend.max_workers,
            bundle,
        )

    @property
    def canvas_length(self) -> int:
        return self.config.canvas_length

    def new_row(self) -> Row:
        """The empty state of a new request."""
        return Row(RequestCache(self.config))

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Scaled embeddings, float32 `[..., hidden_size]`, of int64 `tokens` `[...]`."""
        return np.asarray(self._table[tokens], np.float32) * self._scale

    def first_hidden(self, canvas: np.ndarray) -> np.ndarray:
        """The hidden states `[canvas, hidden_size]` of a block's first canvas, with no signal yet."""
        embedded = self.embed(canvas)
        square = np.mean(embedded * embedded, axis=-1, keepdims=True, dtype=np.float32)
        return embedded / np.sqrt(square + np.float32(self.config.rms_norm_eps))

    def encode(self, inputs: Sequence[EncodeInput]) -> None:
        """Adds clean tokens to their requests' caches."""
        start = time.perf_counter()
        batches = self._batches(inputs)
        self._map(self._encode_pass, batches)
        self.counters.encode_passes += len(batches)
        self.counters.encode_tokens += sum(len(item.tokens) for item in inputs)
        self.counters.encode_seconds += time.perf_counter() - start

    def denoise(self, inputs: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        """One denoising step of each request, in order. Caches are read, not written."""
        start = time.perf_counter()
        batches = self._batches(inputs)
        outputs = [output for part in self._map(self._denoise_pass, batches) for output in part]
        self.counters.denoise_passes += len(batches)
        self.counters.denoise_seconds += time.perf_counter() - start
        return outputs

    def _batches(self, inputs: Sequence[Input]) -> list[Sequence[Input]]:
        if self.rows_apart:
            return [[item] for item in inputs]
        return [inputs] if inputs else []

    def _map(self, run: Callable[[Batch], Output], batches: Sequence[Batch]) -> list[Output]:
        """Passes side by side where there are several; they share no state."""
        if self._pool is None or len(batches) < 2:
            return [run(batch) for batch in batches]
        return list(self._pool.map(run, batches))

    def _encode_pass(self, batch: Sequence[EncodeInput]) -> None:
        counts = [len(item.tokens) for item in batch]
        tokens = np.full((len(batch), max(counts)), self.config.pad_token_id, np.int64)
        positions = np.full(tokens.shape, -1, np.int64)
        for index, (item, count) in enumerate(zip(batch, counts, strict=True)):
            tokens[index, :count] = item.tokens
            begin = item.row.cache.length
            positions[index, :count] = np.arange(begin, begin + count)
        rows = [item.row for item in batch]
        feeds = self._feeds(rows, positions, causal=True)
        hidden = self.embed(tokens)
        for body in self._bodies:
            out = self._run_body(body, feeds | {"hidden": hidden}, rows, "encode", sum(counts))
            hidden = out["hidden_out"]
            for layer in body.layers:
                keys, values = out[f"new_key_{layer}"], out[f"new_value_{layer}"]
                for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
                    here = slice(index, index + 1)
                    row.cache.append(layer, keys[here, :, :count], values[here, :, :count])
        for row, count in zip(rows, counts, strict=True):
            row.cache.advance(count)

    def _denoise_pass(self, batch: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        length = self.canvas_length
        rows = [item.row for item in batch]
        begin = np.array([row.cache.length for row in rows], np.int64)
        positions = begin[:, None] + np.arange(length, dtype=np.int64)
        feeds = self._feeds(rows, positions, causal=False)
        hidden = _stack([item.hidden for item in batch])
        for body in self._bodies:
            tokens = positions.size
            hidden = self._run_body(body, feeds | {"hidden": hidden}, rows, "denoise", tokens)[
                "hidden_out"
            ]
        out = self._head.run(
            {
                "hidden": hidden,
                "temperature": np.array([item.temperature for item in batch], np.float32),
                "entropy_bound": np.array([item.entropy_bound for item in batch], np.float32),
                "uniforms": _stack([item.uniforms for item in batch]),
                "noise": _stack([item.noise for item in batch]),
            }
        )
        names = ("canvas", "argmax", "entropy", "accepted", "next_hidden")
        return [DenoiseOutput(*(out[name][i] for name in names)) for i in range(len(batch))]

    def _feeds(self, rows: Sequence[Row], positions: np.ndarray, causal: bool) -> Arrays:
        past = rows[0].past if len(rows) == 1 else self._past
        return past.feeds([row.cache for row in rows]) | {
            "positions": positions,
            "groups": np.full(positions.shape, -1, np.int64),
            "causal": np.full(len(rows), causal),
        }

    def _run_body(
        self, body: Body, feeds: Arrays, rows: Sequence[Row], phase: str, tokens: int
    ) -> Arrays:
        """Runs a segment, and again with more room while an expert is given more than its capacity."""
        segment = body.segment
        fed = {name: feeds[name] for name in segment.inputs if name != "slots"}
        wanted = None if phase == "encode" else ("hidden_out", "load")
        learned = [
            row.capacities.setdefault((segment.name, phase), Capacity(self.config)) for row in rows
        ]
        capacity = max(each.choose(tokens) for each in learned)
        while True:
            fed["slots"] = np.arange(capacity, dtype=np.int64)
            out = segment.run(fed, wanted)
            over = out["load"][out["load"] > capacity]
            if not over.size:
                break
            # Only the first overflowing layer's load can be relied on; the later ones saw its result.
            with self._counting:
                self.counters.overflows += 1
            capacity = rounded(int(over[0]) * 1.1, tokens)
        for each in learned:
            each.record(int(out["load"].max()), tokens)
        return out


def pass_work(config: ModelConfig) -> int:
    """Multiply-adds by weights in one request's denoising pass."""
    size, experts = config.hidden_size, config.top_k_experts
    gated = 3 * size
    weights = 2 * config.vocab_size * size + gated * config.intermediate_size
    for layer in config.layers:
        heads = 2 * config.num_attention_heads + 2 * layer.num_kv_heads
        weights += size * layer.head_dim * heads
        weights += gated * (config.intermediate_size + experts * config.moe_intermediate_size)
    return weights * config.canvas_length


def _backend(target: dict | None, threads: int | None, work: int) -> Backend:
    name = (target or {}).get("backend", "onnxruntime")
    if name != "onnxruntime":
        raise CanvasError(
            f"the bundle was built for {name}, which this runtime cannot run yet",
            "build it for the target `cpu`",
        )
    from canvasrt.runtime.onnxruntime import OrtBackend

    return OrtBackend(threads, work)


def _stack(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


def _map_table(bundle: Bundle) -> np.ndarray:
    """The embedding table `[vocab_size, hidden_size]`, mapped from its file and read on demand."""
    entry = bundle.manifest.embedding
    if entry is None:
        raise CanvasError(
            f"{bundle.path} carries no embedding table", "export the checkpoint again"
        )
    dtype = np.dtype(entry["dtype"]).newbyteorder("<")
    return np.memmap(bundle.file(entry["file"]), dtype=dtype, mode="r", shape=tuple(entry["shape"]))
