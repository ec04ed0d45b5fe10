"""A model whose arrays are in host memory, with one cache per request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from canvasrt.bundle import Bundle
from canvasrt.defaults import GEOMETRY
from canvasrt.expert_slots import Capacity, rounded_capacity
from canvasrt.pass_shapes import canvas_sizes
from canvasrt.runtime.body_inputs import Geometry, expert_slots
from canvasrt.runtime.engine import Arrays, Backend, Segment
from canvasrt.runtime.kv_cache import CanvasFeeds, RequestCache, past_feeds, token_feeds
from canvasrt.runtime.model import BatchT, InputT, Model, OutputT
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, EncodeInput, Saved
from canvasrt.runtime.pictures import Picture
from canvasrt.types import Json

# Keys: a segment's name, and the phase.
Capacities = dict[tuple[str, str], Capacity]


@dataclass
class HostRow:
    """The state of one request: its KV cache, the inputs of its passes, and the expert capacities learned so far."""

    cache: RequestCache
    canvas: CanvasFeeds
    capacities: Capacities = field(default_factory=dict)


class HostModel(Model):
    """The segments of one bundle. Not thread-safe."""

    def __init__(self, bundle: Bundle, backend: Backend, max_context: int) -> None:
        """Open every segment of a bundle; the vision tower is loaded at the first image."""
        super().__init__(bundle, max_context, backend.rows_apart)
        entries = {each["name"]: each for each in bundle.manifest.segments}
        self._open_vision = partial(self._open, backend, entries.pop("vision", {}))
        with ThreadPoolExecutor(backend.max_loads, "canvasrt-load") as pool:
            found = pool.map(partial(self._open, backend), entries.values())
            opened = dict(zip(entries, found, strict=True))
        self._vision: Segment | None = None
        # The body segments, and the layers that each segment runs.
        self._bodies = [
            (opened[name], entry["layers"]) for name, entry in entries.items() if "layers" in entry
        ]
        self._head = opened["head"]
        self.geometry = Geometry(opened.get(GEOMETRY))
        self._canvas = CanvasFeeds(self.geometry)  # cached inputs of passes over several requests
        self._helpers = backend.max_workers - 1
        self._pool = ThreadPoolExecutor(self._helpers, "canvasrt") if self._helpers else None
        self._counting = threading.Lock()
        self.chunk_steps = self.prefill_chunk // self.canvas_length

    def _open(self, backend: Backend, entry: Json) -> Segment:
        return backend.open(entry["name"], self.bundle.file(entry["file"]))

    @property
    def canvas_sizes(self) -> tuple[int, ...]:
        return canvas_sizes(self.canvas_length)

    def new_row(self) -> HostRow:
        return HostRow(RequestCache(self.config), CanvasFeeds(self.geometry))

    def saved_bytes(self, tokens: int) -> int:
        return RequestCache(self.config).saved_bytes(tokens)

    def _save(self, row: HostRow, tokens: int) -> tuple[Any, Capacities]:
        learned = {key: copy(each) for key, each in row.capacities.items() if key[1] == "encode"}
        return row.cache.save(tokens), learned

    def _restore(self, row: HostRow, saved: Sequence[Saved]) -> None:
        row.cache.restore([each.data[0] for each in saved], sum(each.tokens for each in saved))
        row.capacities |= {key: copy(each) for key, each in saved[-1].data[1].items()}

    def _batches(self, inputs: Sequence[InputT]) -> list[Sequence[InputT]]:
        if self.rows_apart:
            return [[item] for item in inputs]
        groups: dict[object, list[InputT]] = {}
        for item in inputs:
            key = (len(item.hidden), item.outputs) if isinstance(item, DenoiseInput) else None
            groups.setdefault(key, []).append(item)
        return list(groups.values())

    def denoise_each(
        self, inputs: Iterable[DenoiseInput], count: int
    ) -> Generator[DenoiseOutput, None, None]:
        if self._pool is None or not self.rows_apart:
            yield from super().denoise_each(inputs, count)
            return
        begin, ends = time.perf_counter(), list[float]()

        def run(item: DenoiseInput) -> DenoiseOutput:
            (output,) = self._denoise_pass([item])
            ends.append(time.perf_counter())
            return output

        try:
            yield from self._each(run, inputs, count)
        finally:
            self.counters.denoise_passes += len(ends)
            self.counters.denoise_seconds += max(ends, default=begin) - begin

    def _map(self, run: Callable[[BatchT], OutputT], batches: Sequence[BatchT]) -> list[OutputT]:
        return list(self._each(run, batches, len(batches)))

    def _each(
        self, run: Callable[[BatchT], OutputT], batches: Iterable[BatchT], count: int
    ) -> Iterator[OutputT]:
        """Run passes concurrently if there are several workers. Passes share no state. Yields results in order.

        The calling thread is one of the workers. If it only waited for the others, waking it up at the end would take a
        tenth of the time of a small model's pass.
        """
        if self._pool is None or count < 2:
            yield from map(run, batches)
            return
        left, taking, done = enumerate(batches), threading.Lock(), dict[int, OutputT]()
        failed = threading.Event()  # once set, no further pass is started

        def work() -> None:
            try:
                while not failed.is_set():
                    with taking:
                        index, batch = next(left, (count, None))
                    if batch is None:
                        return
                    done[index] = run(batch)
            except BaseException:
                failed.set()
                raise

        helpers = [self._pool.submit(work) for _ in range(min(self._helpers, count - 1))]
        try:
            work()
            for index in range(count):
                if index not in done:
                    for each in helpers:
                        each.result()
                yield done[index]
        finally:
            wait(helpers)

    def _see(self, picture: Picture) -> np.ndarray:
        if self._vision is None:
            self._vision = self._open_vision()
        fed = {"pixel_values": picture.pixels[None], "pixel_positions": picture.positions[None]}
        out = self._vision.run(fed)
        return out["features"][0][out["valid"][0]]

    def _encode_pass(self, batch: Sequence[EncodeInput]) -> None:
        counts = [len(item.tokens) for item in batch]
        tokens = np.full((len(batch), max(counts)), self.config.pad_token_id, np.int64)
        positions = np.full(tokens.shape, -1, np.int64)
        for index, (item, count) in enumerate(zip(batch, counts, strict=True)):
            tokens[index, :count] = item.tokens
            begin = item.row.cache.length
            positions[index, :count] = np.arange(begin, begin + count)
        rows = [item.row for item in batch]
        self._canvas_of(rows).clear()
        feeds = past_feeds([row.cache for row in rows]) | token_feeds(positions, causal=True)
        marks = [item.row.cache.mark() if item.keep else None for item in batch]
        hidden = self.embed(tokens)
        for index, item in enumerate(batch):
            if item.groups is not None and item.features is not None:
                feeds["groups"][index, : len(item.groups)] = item.groups
                hidden[index, : len(item.groups)][item.groups >= 0] = item.features
        feeds = self.geometry.complete(feeds)
        for segment, layers in self._bodies:
            out = self._run_body(segment, feeds | {"hidden": hidden}, rows, "encode", sum(counts))
            hidden = out["hidden_out"]
            for layer in layers:
                # Free the old keys and values.
                del feeds[f"past_key_{layer}"], feeds[f"past_value_{layer}"]
                keys, values = out[f"new_key_{layer}"], out[f"new_value_{layer}"]
                for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
                    here = slice(index, index + 1)
                    row.cache.append(layer, keys[here, :, :count], values[here, :, :count])
        for item, count, mark, states in zip(batch, counts, marks, hidden, strict=True):
            if mark is None or item.keep is None or item.keep(states[:count]):
                item.row.cache.advance(count)
            else:
                item.row.cache.rewind(mark)

    def _denoise_pass(self, batch: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        length = len(batch[0].hidden)
        rows = [item.row for item in batch]
        feeds = self._canvas_of(rows).of([row.cache for row in rows], length)
        hidden = _stack([item.hidden for item in batch])
        for segment, _ in self._bodies:
            fed = feeds | {"hidden": hidden}
            hidden = self._run_body(segment, fed, rows, "denoise", len(rows) * length)["hidden_out"]
        outputs = batch[0].outputs
        if outputs == "hidden":
            return [DenoiseOutput(hidden=each) for each in hidden]
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
        shown = hidden if outputs == "both" else [None] * len(batch)
        return [
            DenoiseOutput(hidden=shown[i], **{name: out[name][i] for name in names})
            for i in range(len(batch))
        ]

    def _canvas_of(self, rows: Sequence[HostRow]) -> CanvasFeeds:
        return rows[0].canvas if len(rows) == 1 else self._canvas

    def _run_body(
        self, segment: Segment, feeds: Arrays, rows: Sequence[HostRow], phase: str, tokens: int
    ) -> Arrays:
        """Run a segment. If the segment has expert slots, run it again with more slots until no expert overflows."""
        fed = {name: feeds[name] for name in segment.inputs if name in feeds}
        if "load" not in segment.outputs:
            return segment.run(fed, None if phase == "encode" else ("hidden_out",))
        wanted = None if phase == "encode" else ("hidden_out", "load")
        learned = [
            row.capacities.setdefault((segment.name, phase), Capacity(self.config)) for row in rows
        ]
        capacity = max(each.choose(tokens) for each in learned)
        while True:
            fed |= expert_slots(capacity, self.config.num_experts)
            out = segment.run(fed, wanted)
            over = out["load"][out["load"] > capacity]
            if not over.size:
                break
            # Only the first overflowing layer's load is reliable, because later layers had wrong inputs.
            with self._counting:
                self.counters.overflows += 1
            capacity = rounded_capacity(int(over[0]) * 1.1, tokens)
        for each in learned:
            each.record(int(out["load"].max()), tokens)
        return out


def _stack(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)
