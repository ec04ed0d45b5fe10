"""A model whose caches and hidden states stay in device memory: TensorRT, or ONNX Runtime on CUDA.

All memory is taken at load, at the largest sizes that the engines' profiles allow, and every call
writes in place. Only tokens, entropies and acceptance flags of a canvas cross to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from canvasrt.bundle import Bundle
from canvasrt.checkpoints.config import ModelConfig, SamplerDefaults
from canvasrt.defaults import OCTET, PREFILL_CHUNK
from canvasrt.pass_shapes import PassShape, canvas_sizes, in_units
from canvasrt.runtime.engine import DeviceBackend, Engine, Pitched
from canvasrt.runtime.gpu.launches import Launches, Pass, give, too_full
from canvasrt.runtime.gpu.prefix_pages import Pages
from canvasrt.runtime.gpu.shape_choice import PassShapes
from canvasrt.runtime.gpu.sight import Sight, place
from canvasrt.runtime.gpu.slots import DeviceRow, Resident
from canvasrt.runtime.gpu.workspace import ATTENTION_KINDS, DeviceSegment, Workspace, WorkspaceSizes
from canvasrt.runtime.model import InputT, Model
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, EncodeInput, Hidden, Saved
from canvasrt.runtime.pictures import Picture
from canvasrt.runtime.tables import Table, map_table

# A repeated call is captured at the latest when it comes a third time.
_UNTIL_CAPTURED = 3


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
        self._backend = backend
        self.segments = tuple(segments)
        self.prefill_chunk = min(PREFILL_CHUNK, self._largest("length"))
        self.max_batch = self._largest("batch", length=config.canvas_length)
        past = self._past()
        self.shapes = self._shapes(past["full"])
        engines = [segment.engine for segment in self.segments]
        for engine in [*engines, vision] if vision else engines:
            engine.prepare()
        sizes = WorkspaceSizes(self.max_batch, self.shapes.lengths[-1], past, self.shapes.widths)
        self.workspace = Workspace(self.device, config, self.segments, sizes)
        self._cache = self.workspace.cache
        self._sight = Sight(self.device, vision, config) if vision else None
        self._launches = Launches(self.workspace, config)
        self._pages: Pages | None = None

    @classmethod
    def open(cls, bundle: Bundle, backend: DeviceBackend, max_context: int) -> DeviceModel:
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
            max_context,
            backend,
            bundle,
            vision.engine if vision else None,
        )

    @property
    def canvas_sizes(self) -> tuple[int, ...]:
        head = self.segments[-1].engine.profiles
        sizes = canvas_sizes(self.canvas_length)
        return tuple(each for each in sizes if head.pick({"batch": 1, "length": each}) is not None)

    def _largest(self, name: str, **others: int) -> int:
        """Return the largest size of a dimension for which every body segment has a profile."""
        return min(segment.engine.profiles.largest(name, others) for segment in self.segments[:-1])

    def share_passes(self, share: bool) -> None:
        """Let requests share passes from now on, or not. None may be running."""
        self.rows_apart = not share
        self.shapes = self._shapes(self.workspace.sizes.past["full"])
        self._cache.widths = self.shapes.widths

    def _shapes(self, most: int) -> PassShapes:
        batch = 1 if self.rows_apart else self.max_batch
        # Engines without the vision tower have fewer slots than tokens.
        slots = self._largest("capacity", batch=1, length=self.prefill_chunk)
        return PassShapes(self.config, self.prefill_chunk, most, batch, slots)

    def _past(self) -> dict[str, int]:
        """Return the most tokens that a request's layers of each kind hold."""
        limits = {
            "sliding": min(self.config.sliding_window - 1, self.max_context),
            "full": self.max_context,
        }
        return {
            kind: min(in_units(limits[kind]), OCTET * self._largest(f"octets_{kind}"))
            for kind in ATTENTION_KINDS
        }

    def warm_up(self) -> None:
        """Run every shape that a pass or an image can have, so that no request waits for one to be compiled.

        Call it before the first request.
        """
        narrow = self.shapes.widths[0]
        shapes = [(shape, shape.length) for shape in self.shapes]
        shapes += [(self.shapes.alone(size, narrow), size) for size in self.canvas_sizes[:-1]]
        # Engines keep the captures of the latest calls. Most requests start with the first shapes: a whole canvas, a short
        # past and the fewest slots.
        for shape, canvas in reversed(shapes):
            alone = shape.phase == "denoise" and shape.batch == 1 and shape.width == narrow
            # Each slot's caches are its own, and so are the calls that read them.
            for slot in reversed(range(self._cache.slots if alone else 1)):
                self._warm_up(replace(self._pass(shape, [], canvas), first=slot), shape.capacity)
        if self._sight is not None:
            self._sight.warm_up()
        self._backend.keep_compiled()

    def _warm_up(self, this: Pass, capacity: int) -> None:
        self.workspace.given.view("positions", this.batch, this.length)[:] = -1
        self.workspace.given.view("temperature", this.batch)[:] = 1
        self.workspace.given.upload()
        for _ in range(_UNTIL_CAPTURED if this.phase == "denoise" else 1):
            self._run(this, [capacity] * len(self.segments[:-1]))

    def new_row(self) -> DeviceRow:
        return DeviceRow()

    def release(self, row: DeviceRow) -> None:
        self._cache.release(row)

    def _see(self, picture: Picture) -> np.ndarray:
        assert self._sight is not None
        return self._sight.see(picture)

    def park(self, row: DeviceRow, hidden: Hidden) -> tuple[Hidden, bool]:
        if isinstance(hidden, Resident):
            hidden = self._fetch(row, hidden)
        loads = dict(row.loads)
        self.release(row)
        # The same block goes on later, in the same shapes.
        row.loads |= loads
        return hidden, True

    def _fetch(self, row: DeviceRow, hidden: Hidden) -> np.ndarray:
        if not isinstance(hidden, Resident):
            return np.asarray(hidden)
        shape = (hidden.length, self.config.hidden_size)
        kept = np.empty(shape, self.workspace.hidden_dtype)
        assert row.slot is not None
        self.device.download(kept, self.workspace.state + row.slot * self.workspace.row_bytes)
        self.device.synchronize()
        return kept

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

    def _batches(self, inputs: Sequence[InputT]) -> list[Sequence[InputT]]:
        for item in inputs:
            self._cache.take(item.row)
        ordered = sorted(inputs, key=lambda item: item.row.slot)
        groups: list[list[InputT]] = [[item for item in ordered if self._shares(item)]]
        groups += [[item] for item in ordered if not self._shares(item)]
        return [group for group in groups if group]

    def _shares(self, item: InputT) -> bool:
        """Return whether a row's pass is one that all requests share, whether or not there are others."""
        if self.rows_apart or isinstance(item, EncodeInput) or item.row.load(0):
            return False
        return len(item.noise) == self.canvas_length

    def _encode_pass(self, batch: Sequence[EncodeInput], roomy: bool = False) -> None:
        (item,) = batch
        row, count = item.row, len(item.tokens)
        if roomy:
            self._cache.make_widest(row)
        shape = self.shapes.roomy() if roomy else self.shapes.encode(count, row.width)
        this = replace(self._pass(shape, [row]), pictured=item.groups is not None)
        tokens = np.full((1, this.length), self.config.pad_token_id, np.int64)
        tokens[0, :count] = item.tokens
        space = self.workspace
        positions = space.given.view("positions", 1, this.length)
        positions[:] = -1
        positions[0, :count] = np.arange(row.length, row.length + count)
        space.given.upload()
        hidden = self.embed(tokens)
        if this.pictured:
            place(space, this, batch, hidden)
        self.device.upload(space.hidden[0], self._as_hidden(hidden))
        if self._run(this, [shape.capacity] * len(self.segments[:-1])) is not None:
            self._encode_again(item, shape.capacity == this.length)
            return
        if item.keep is not None:
            states = self.workspace.last_hidden(this.batch, this.length)[0, :count]
            if not item.keep(states):
                return
        self._cache.make_room(row, count)
        for layer in range(len(self.config.layers)):
            keys, values = space.new("encode", layer)
            self._cache.append(row, layer, keys, values, this.length, count)
        row.length, row.hidden = row.length + count, None

    def _encode_again(self, item: EncodeInput, was_roomy: bool) -> None:
        """Encode tokens that overloaded an expert in two passes, or with a slot for each. Nothing has changed so far.

        Tokens of one image see each other, so they stay in one pass, and so do those of a block with a score.
        """
        self.counters.overflows += 1
        middle = (len(item.tokens) + 1) // 2
        if was_roomy or middle == len(item.tokens):
            raise too_full()
        if item.groups is not None or item.whole:
            self._encode_pass([item], roomy=True)
            return
        self._encode_pass([EncodeInput(item.row, item.tokens[:middle])])
        self._encode_pass([EncodeInput(item.row, item.tokens[middle:], keep=item.keep)])

    def _denoise_pass(self, batch: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        space, shared, canvas = self.workspace, self._shares(batch[0]), len(batch[0].noise)
        width = batch[0].row.width
        shape = self.shapes.shared(width) if shared else self.shapes.alone(canvas, width)
        this = self._pass(shape, [item.row for item in batch], canvas)
        for item in batch:
            self._take_hidden(item)
        give(space, this, batch)
        states = space.state + this.first * space.row_bytes
        self._copy(space.hidden[0], states, this.batch * space.row_bytes)
        head = any(item.wants != "hidden" for item in batch)
        if not shared:
            self._run_alone(this, batch[0].row, head)
        else:
            capacities = [shape.capacity] * len(self.segments[:-1])
            if self._run(this, capacities, head=head) is not None:
                return self._apart(batch)
        shown = None
        if any(item.wants != "tokens" for item in batch):
            shown = space.last_hidden(this.batch, canvas)
        return [self._output(this, item, shown) for item in batch]

    def _apart(self, batch: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        """Run requests that overloaded an expert together one by one, in passes of the same shape.

        One that overloads it alone does so whoever shares its pass. Nothing has changed so far.
        """
        self.counters.overflows += 1
        if len(batch) == 1:
            row: DeviceRow = batch[0].row
            for number in range(len(self.segments[:-1])):
                row.overload(number, self.shapes.shared(row.width).capacity + 1)
            return self._denoise_pass(batch)
        return [output for item in batch for output in self._denoise_pass([item])]

    def _pass(self, shape: PassShape, rows: Sequence[DeviceRow], canvas: int = 0) -> Pass:
        slots = [row.slot for row in rows if row.slot is not None]
        first = 0 if shape.batch > 1 or not slots else slots[0]
        sizes = shape.batch, shape.length, shape.width
        return Pass(shape.phase, first, *sizes, tuple(rows), canvas=canvas)

    def _take_hidden(self, item: DenoiseInput) -> None:
        """Put a row's hidden states where the pass reads them, unless they are there already."""
        if not isinstance(item.hidden, Resident):
            address = self.workspace.state + item.row.slot * self.workspace.row_bytes
            self.device.upload(address, self._as_hidden(item.hidden))
        elif item.hidden != Resident(item.row, item.row.hidden, len(item.noise)):
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
        shape = (this.batch, this.canvas)
        canvas, argmax, entropy, accepted = (
            space.results.view(name, *shape)[index].copy()
            for name in ("canvas", "argmax", "entropy", "accepted")
        )
        kept = Resident(row, row.hidden, this.canvas)
        return DenoiseOutput(canvas, argmax, entropy, accepted, kept, hidden)

    def _run_alone(self, this: Pass, row: DeviceRow, head: bool) -> None:
        """Denoise one request's canvas. A segment in which an expert overflowed, and all after it, have room for as many
        tokens until the block ends: that depends on the request alone."""
        begin = 0
        while True:
            capacities = [
                self.shapes.alone(this.canvas, this.width, row.load(number)).capacity
                for number in range(len(self.segments[:-1]))
            ]
            over = self._run(this, capacities, begin, head)
            if over is None:
                return
            if capacities[over] == this.length:
                raise too_full()
            self.counters.overflows += 1
            load = int(self.workspace.load(over).max())
            # Padding routes alike in every segment; found one by one, each would repeat the rest of the pass.
            for number in range(over, len(capacities)):
                row.overload(number, max(load, row.load(number)))
            begin = over

    def _run(
        self, this: Pass, capacities: Sequence[int], begin: int = 0, head: bool = True
    ) -> int | None:
        """Run the engines in turn, from segment `begin` on. Return the first that overloaded an expert, if any.

        The host waits once, at the end: overflows are rare, and each segment's input is still there.
        """
        self._cache.show_positions(this.first, this.batch)
        for number in range(begin, len(capacities)):
            self._launches.body(number, this, capacities[number])
        if head and this.phase == "denoise":
            self._launches.head(this)
        self.workspace.results.download()
        self.device.synchronize()
        # Later layers and segments worked on wrong inputs.
        over = (n for n, size in enumerate(capacities) if (self.workspace.load(n) > size).any())
        return next(over, None)

    def _copy(self, to: int, source: int, size: int) -> None:
        self.device.copy(Pitched(to, size), Pitched(source, size), size, 1)
