"""A model whose caches and hidden states stay in device memory: TensorRT, or ONNX Runtime on CUDA.

All memory is taken at load, at the largest sizes that the engines' profiles allow, and every call
writes in place. Only tokens, entropies and acceptance flags of a canvas cross to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from canvasrt.bundle import Bundle
from canvasrt.checkpoints.config import ModelConfig, SamplerDefaults
from canvasrt.defaults import ENCODE_TOKENS, OCTET, PREFILL_CHUNK, octets
from canvasrt.errors import EngineError
from canvasrt.runtime.capacity import Capacity, stepped
from canvasrt.runtime.engine import Call, DeviceBackend, Engine, Pitched
from canvasrt.runtime.gpu.calls import Pass, body_call, head_call
from canvasrt.runtime.gpu.pages import Pages
from canvasrt.runtime.gpu.sight import Sight, place
from canvasrt.runtime.gpu.slots import DeviceRow
from canvasrt.runtime.gpu.workspace import KINDS, DeviceSegment, Sizes, Workspace
from canvasrt.runtime.model import Input, Model
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, EncodeInput, Hidden, Saved
from canvasrt.runtime.pictures import Picture
from canvasrt.runtime.tables import Table, map_table
from canvasrt.runtime.tables import max_context as context_limit

# Idle slots allowed between two requests of a pass: computing them is cheaper than reading the
# weights again.
GAP = 2
# How many calls are remembered. Sizes come in steps, so there are few.
_CALLS = 1024


class _TooFull(Exception):
    """An expert was given more tokens than an engine has room for."""


@dataclass(frozen=True)
class Resident:
    """Hidden states that stay on the device. `number` tells a row's newest from older ones."""

    row: DeviceRow
    number: int


class DeviceModel(Model):
    """The engines of one bundle over one device's memory. Not thread-safe."""

    max_batch: int
    # A request that makes room is encoded again later, so turns are long.
    quantum = 96

    def __init__(
        self,
        config: ModelConfig,
        sampler: SamplerDefaults,
        segments: Sequence[DeviceSegment],
        table: Table,
        max_context: int,
        backend: DeviceBackend,
        bundle: Bundle | None = None,
        vision: Engine | None = None,
    ) -> None:
        """Take all memory. `segments` are the body segments in order, then the head."""
        super().__init__(config, sampler, table, max_context, backend.rows_apart, bundle)
        self.device = backend.device
        self.device_name = backend.device.name
        self.segments = tuple(segments)
        self.prefill_chunk = min(PREFILL_CHUNK, self._largest("length"))
        self.max_batch = self._largest("batch", length=config.canvas_length)
        for engine in (
            *(segment.engine for segment in self.segments),
            *([vision] if vision else []),
        ):
            engine.prepare()
        self.workspace = Workspace(self.device, config, self.segments, self._sizes())
        self._cache = self.workspace.cache
        self._sight = Sight(self.device, vision, config) if vision else None
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._pages: Pages | None = None

    @classmethod
    def open(cls, bundle: Bundle, backend: DeviceBackend) -> DeviceModel:
        """Open every engine of a bundle."""
        manifest = bundle.manifest
        opened = {
            entry["name"]: DeviceSegment(
                backend.open_engine(
                    entry["name"], bundle.file(entry["file"]), entry.get("profiles")
                ),
                tuple(entry.get("layers", ())),
            )
            for entry in manifest.segments
        }
        vision = opened.pop("vision", None)
        return cls(
            manifest.model,
            manifest.sampler,
            list(opened.values()),
            map_table(bundle),
            context_limit(manifest),
            backend,
            bundle,
            vision.engine if vision else None,
        )

    def _largest(self, name: str, **others: int) -> int:
        """Return the largest size of a dimension for which every body segment has a profile."""
        return min(segment.engine.profiles.largest(name, others) for segment in self.segments[:-1])

    def _sizes(self) -> Sizes:
        one_row = max(self.prefill_chunk, self.canvas_length)
        encode_tokens = max(one_row, min(ENCODE_TOKENS, self.max_batch * one_row))
        limits = {"sliding": min(self.config.sliding_window - 1, self.max_context)}
        limits["full"] = self.max_context
        capacity = max(encode_tokens, self.max_batch * self.canvas_length)
        return Sizes(
            self.max_batch,
            one_row,
            encode_tokens,
            min(capacity, self._largest("capacity")),
            {
                kind: OCTET * min(octets(limits[kind]), self._largest(f"octets_{kind}"))
                for kind in KINDS
            },
        )

    def new_row(self) -> DeviceRow:
        return DeviceRow()

    def release(self, row: DeviceRow) -> None:
        self._cache.release(row)
        self._cache.narrow()

    def _see(self, picture: Picture) -> np.ndarray:
        assert self._sight is not None
        return self._sight.see(picture)

    def park(self, row: DeviceRow, hidden: Hidden) -> tuple[Hidden, bool]:
        if isinstance(hidden, Resident):
            shape = (self.canvas_length, self.config.hidden_size)
            kept = np.empty(shape, self.workspace.hidden_dtype)
            assert row.slot is not None
            self.device.download(kept, self.workspace.state + row.slot * self.workspace.row_bytes)
            self.device.synchronize()
            hidden = kept
        self.release(row)
        # Encoding again must learn again, or its passes would have other shapes.
        for key in [key for key in row.capacities if key[1] == "encode"]:
            del row.capacities[key]
        return hidden, True

    def check_device(self) -> None:
        self.device.synchronize()

    def reserve(self, limit: int) -> int:
        if self._pages is None and limit:
            self._pages = Pages(self.device, self._cache, limit)
        return self._pages.bytes if self._pages else 0

    def saved_bytes(self, tokens: int) -> int:
        return self._pages.saved_bytes(tokens) if self._pages else 1

    def forget(self, saved: Saved) -> None:
        assert self._pages is not None
        self._pages.free(saved.data)

    def _save(self, row: DeviceRow, tokens: int) -> list[int]:
        assert self._pages is not None
        return self._pages.save(row, tokens)

    def _restore(self, row: DeviceRow, saved: Sequence[Saved]) -> None:
        assert self._pages is not None
        self._cache.take(row)
        self._pages.restore(row, [(each.data, each.tokens) for each in saved])

    def _batches(self, inputs: Sequence[Input]) -> list[Sequence[Input]]:
        for item in inputs:
            self._cache.take(item.row)
        if not self.rows_apart:
            self._compact()
        groups: list[list[Input]] = []
        for item in sorted(inputs, key=lambda item: item.row.slot):
            if groups and not self.rows_apart and self._joins(groups[-1], item):
                groups[-1].append(item)
            else:
                groups.append([item])
        return list(groups)

    def _compact(self) -> None:
        size = self.workspace.row_bytes
        for source, to in self._cache.compact():
            state = self.workspace.state
            self._copy(state + to * size, state + source * size, size)

    def _joins(self, group: list[Input], item: Input) -> bool:
        """Return whether `item` should join the pass of `group`."""
        gap = item.row.slot - group[-1].row.slot - 1
        batch = item.row.slot - (group[0].row.slot if self._cache.aligned else 0) + 1
        together = [*group, item]
        if isinstance(item, EncodeInput):
            length = max(len(each.tokens) for each in together if isinstance(each, EncodeInput))
            if batch * length > self.workspace.encode_tokens:
                return False
        else:
            length = self.canvas_length
        dims = {"batch": batch, "length": length}
        return gap <= GAP and all(
            segment.engine.profiles.pick(dims) is not None for segment in self.segments[:-1]
        )

    def _encode_pass(self, batch: Sequence[EncodeInput]) -> None:
        counts = [len(item.tokens) for item in batch]
        this = self._pass("encode", [item.row for item in batch], max(counts), sum(counts))
        this = replace(this, pictured=any(item.groups is not None for item in batch))
        space = self.workspace
        tokens = np.full((this.batch, this.length), self.config.pad_token_id, np.int64)
        positions = space.given.view("positions", this.batch, this.length)
        positions[:] = -1
        for item, count in zip(batch, counts, strict=True):
            index, begin = this.index(item.row), item.row.length
            tokens[index, :count] = item.tokens
            positions[index, :count] = np.arange(begin, begin + count)
        space.given.upload()
        hidden = self.embed(tokens)
        if this.pictured:
            place(space, this, batch, hidden)
        self.device.upload(space.hidden[0], self._as_hidden(hidden))
        try:
            self._run(this)
        except _TooFull:
            self._apart(batch, self._encode_pass)
            return
        self._cache.make_room(this.rows, counts)
        for row, count in zip(this.rows, counts, strict=True):
            for layer in range(len(self.config.layers)):
                keys, values = space.new("encode", layer)
                each = self.config.layers[layer]
                skip = this.length * each.num_kv_heads * each.head_dim * space.itemsizes[layer]
                skip *= this.index(row)
                self._cache.append(row, layer, keys + skip, values + skip, this.length, count)
            row.length, row.hidden = row.length + count, None

    def _denoise_pass(self, batch: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        length, space = self.canvas_length, self.workspace
        rows = [item.row for item in batch]
        this = self._pass("denoise", rows, length, length * len(rows))
        shape = (this.batch, length)
        given = {
            name: space.given.view(name, *shape) for name in ("positions", "noise", "uniforms")
        }
        temperature = space.given.view("temperature", this.batch)
        bound = space.given.view("entropy_bound", this.batch)
        # Idle rows compute on whatever is there; nobody reads their results.
        given["positions"][:], given["noise"][:], given["uniforms"][:] = -1, 0, 0
        temperature[:], bound[:] = 1, 0
        for item in batch:
            index = this.index(item.row)
            given["positions"][index] = np.arange(item.row.length, item.row.length + length)
            given["noise"][index], given["uniforms"][index] = item.noise, item.uniforms
            temperature[index], bound[index] = item.temperature, item.entropy_bound
            self._take_hidden(item)
        space.given.upload()
        self._copy(
            space.hidden[0],
            space.state + this.first * space.row_bytes,
            this.batch * space.row_bytes,
        )
        try:
            self._run(this, head=any(item.wants != "hidden" for item in batch))
        except _TooFull:
            return self._apart(batch, self._denoise_pass)
        shown = self._last_hidden(this) if any(item.wants != "tokens" for item in batch) else None
        return [self._output(this, item, shown) for item in batch]

    def _last_hidden(self, this: Pass) -> np.ndarray:
        """Return the last layer's output, float32 `[batch, canvas, hidden_size]`."""
        shape = (this.batch, this.length, self.config.hidden_size)
        size = this.batch * self.workspace.row_bytes
        held = np.empty(size, np.uint8)
        self.device.download(held, self.workspace.hidden[-1])
        self.device.synchronize()
        return held.view(self.workspace.hidden_dtype).reshape(shape).astype(np.float32)

    def _apart(self, batch: Sequence[Any], run: Any) -> list[Any]:
        """Run a batch that overloads an expert as passes of one row each. Nothing has changed so
        far."""
        if len(batch) == 1:
            raise EngineError(
                "an expert was given more tokens of one request than the engines have room for",
                "build the bundle again with this version",
            )
        results: list[Any] = []
        for item in batch:
            results += run([item]) or []
        return results

    def _pass(self, phase: str, rows: Sequence[DeviceRow], length: int, tokens: int) -> Pass:
        slots = [row.slot for row in rows if row.slot is not None]
        first = min(slots) if self._cache.aligned else 0
        return Pass(phase, first, max(slots) - first + 1, length, tokens, tuple(rows))

    def _take_hidden(self, item: DenoiseInput) -> None:
        """Put a row's hidden states where the pass reads them, unless they are there already."""
        if not isinstance(item.hidden, Resident):
            address = self.workspace.state + item.row.slot * self.workspace.row_bytes
            self.device.upload(address, self._as_hidden(item.hidden))
        elif item.hidden != Resident(item.row, item.row.hidden):
            raise ValueError("these hidden states belong to another request or an earlier step")

    def _as_hidden(self, hidden: Hidden) -> np.ndarray:
        return np.ascontiguousarray(hidden).astype(self.workspace.hidden_dtype)

    def _output(self, this: Pass, item: DenoiseInput, shown: np.ndarray | None) -> DenoiseOutput:
        row: DeviceRow = item.row
        space, index = self.workspace, this.index(row)
        hidden = None if shown is None or item.wants == "tokens" else shown[index]
        if item.wants == "hidden":
            return DenoiseOutput(hidden=hidden)
        here = index * space.row_bytes
        assert row.slot is not None
        self._copy(
            space.state + row.slot * space.row_bytes, space.next_hidden + here, space.row_bytes
        )
        row.hidden = (row.hidden or 0) + 1
        shape = (this.batch, this.length)
        canvas, argmax, entropy, accepted = (
            space.results.view(name, *shape)[index].copy()
            for name in ("canvas", "argmax", "entropy", "accepted")
        )
        return DenoiseOutput(canvas, argmax, entropy, accepted, Resident(row, row.hidden), hidden)

    def _run(self, this: Pass, head: bool = False) -> None:
        """Run the engines in turn. After an overflow, rerun from the first engine that overflowed,
        with more room.

        The host waits once, at the end: overflows are rare, and each segment's input is still there.
        """
        bodies = self.segments[:-1]
        learned = [self._capacities(segment, this) for segment in bodies]
        capacities = [
            self._room(segment, this, max(each.choose(this.tokens) for each in known))
            for segment, known in zip(bodies, learned, strict=True)
        ]
        begin = 0
        self._cache.show_positions(this.first, this.batch)
        while True:
            for number in range(begin, len(bodies)):
                self._launch_body(number, this, capacities[number])
            if head:
                self._launch_head(this)
            self.workspace.results.download()
            self.device.synchronize()
            over = self._overflow(capacities)
            if over is None:
                break
            begin, needed = over
            self.counters.overflows += 1
            capacities[begin] = self._room(bodies[begin], this, needed, strict=True)
        for number, known in enumerate(learned):
            for each in known:
                each.record(int(self._load(number).max()), this.tokens)

    def _capacities(self, segment: DeviceSegment, this: Pass) -> list[Capacity]:
        key = (segment.engine.name, this.phase)
        return [row.capacities.setdefault(key, Capacity(self.config)) for row in this.rows]

    def _room(self, segment: DeviceSegment, this: Pass, wanted: int, strict: bool = False) -> int:
        """Return a capacity of at least `wanted` that the engine supports, or its largest.

        Raises `_TooFull` if `strict` and the largest is too small.
        """
        dims = {"batch": this.batch, "length": this.length}
        most = min(this.tokens, segment.engine.profiles.largest("capacity", dims))
        most = min(most, self.workspace.sizes.capacity)
        if strict and wanted > most:
            raise _TooFull
        return stepped(wanted, most)

    def _load(self, number: int) -> np.ndarray:
        count = len(self.segments[number].layers)
        return self.workspace.results.view(f"load_{number}", count)

    def _overflow(self, capacities: Sequence[int]) -> tuple[int, int] | None:
        """Return the first segment with an overloaded expert, and the load of its first such layer.

        Later layers and segments worked on wrong inputs.
        """
        for number, capacity in enumerate(capacities):
            load = self._load(number)
            if (load > capacity).any():
                return number, int(load[load > capacity][0])
        return None

    def _launch_body(self, number: int, this: Pass, capacity: int) -> None:
        widths = tuple(past.width for past in self._cache.past.values())
        where = (this.phase, this.pictured, this.first, this.batch, this.length)
        key = (number, *where, capacity, widths)
        call = self._calls.get(key)
        if call is None:
            engine = self.segments[number].engine
            dims = {"batch": this.batch, "length": this.length}
            shared = engine.profiles.smallest("gate_queues", dims) == 1
            made = body_call(self.workspace, self.config, number, this, capacity, shared)
            call = self._remember(key, made)
        self.segments[number].engine.launch(call)

    def _launch_head(self, this: Pass) -> None:
        key = ("head", this.batch)
        call = self._calls.get(key) or self._remember(
            key, head_call(self.workspace, self.config, this)
        )
        self.segments[-1].engine.launch(call)

    def _remember(self, key: tuple[Any, ...], call: Call) -> Call:
        if len(self._calls) >= _CALLS:
            self._calls.clear()
        self._calls[key] = call
        return call

    def _copy(self, to: int, source: int, size: int) -> None:
        self.device.copy(Pitched(to, size), Pitched(source, size), size, 1)
