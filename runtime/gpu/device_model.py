"""A model whose caches and hidden states stay in device memory, run by TensorRT, or by ONNX Runtime on CUDA.

All memory is allocated at load, for the largest sizes of the engines' profiles. A pass copies to the host only a
canvas's tokens, entropies and acceptance flags and, if requested, hidden states.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from canvasrt.bundle import Bundle
from canvasrt.engine_profiles import passes_taken
from canvasrt.pass_shapes import PassPlan, PassShape, canvas_sizes
from canvasrt.runtime.engine import DeviceBackend, Pitched
from canvasrt.runtime.gpu.device_cache import DeviceRow, Resident
from canvasrt.runtime.gpu.launches import Launches, OwnPasses, Pass, too_full, upload_inputs
from canvasrt.runtime.gpu.prefix_pages import Pages
from canvasrt.runtime.gpu.vision import VisionTower, place
from canvasrt.runtime.gpu.workspace import DeviceSegment, Workspace, WorkspaceSizes
from canvasrt.runtime.model import InputT, Model
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, EncodeInput, Hidden, Saved
from canvasrt.runtime.pictures import Picture

_log = logging.getLogger(__name__)
# The number of runs that it takes to capture a call as a CUDA graph: the first run cannot be captured.
_UNTIL_CAPTURED = 2


class DeviceModel(Model):
    """The engines of one bundle, and their memory on one device. Not thread-safe."""

    max_batch: int
    # Turns are long, because a parked request must be encoded again.
    quantum = 96

    def __init__(self, bundle: Bundle, backend: DeviceBackend, max_context: int) -> None:
        """Open every engine of a bundle, and allocate all memory."""
        super().__init__(bundle, max_context, backend.rows_apart)
        self.device = backend.device
        self.device_name = backend.device.name
        self._backend = backend
        opened = {
            entry["name"]: DeviceSegment(
                backend.open_engine(
                    entry["name"], bundle.file(entry["file"]), entry.get("profiles")
                ),
                tuple(entry.get("layers", ())),
            )
            for entry in bundle.manifest.segments
        }
        vision = opened.pop("vision", None)
        self.segments = tuple(opened.values())  # the body segments in order, then the head
        self._plan = self._plan_of(bundle)
        self.prefill_chunk, self.max_batch = self._plan.prefill_chunk, self._plan.batch
        past = {"sliding": self._plan.window, "full": self._plan.widths[-1]}
        self.shapes = self._plan if self.rows_apart else self._plan.sharing()
        for each in [*self.segments, vision] if vision else self.segments:
            each.engine.prepare()
        sizes = WorkspaceSizes(self.max_batch, self.shapes.lengths[-1], past, self.shapes.widths)
        self.workspace = Workspace(self.device, self.config, self.segments, sizes)
        self._cache = self.workspace.cache
        self._sight = VisionTower(self.device, vision.engine, self.config) if vision else None
        self._launches = Launches(self.workspace, self.config, self.shapes)
        self._pages: Pages | None = None
        self.own_passes = OwnPasses(self.shapes.widths)

    @property
    def canvas_sizes(self) -> tuple[int, ...]:
        pick = self.segments[-1].engine.profiles.pick
        sizes = canvas_sizes(self.canvas_length)
        return tuple(each for each in sizes if pick({"batch": 1, "length": each}) is not None)

    def _plan_of(self, bundle: Bundle) -> PassPlan:
        """Return the bundle's pass plan for requests of `max_context` tokens. If the bundle has no plan, derive it from
        the engines' profiles."""
        if (listed := bundle.manifest.passes) is not None:
            return PassPlan.from_json(listed).within(self.max_context)
        bodies = [segment.engine.profiles for segment in self.segments[:-1]]
        return passes_taken(self.config, bodies, self.max_context)

    def share_passes(self, share: bool) -> None:
        """Set whether requests share passes. Call this only while no request is running."""
        self.rows_apart = not share
        self.shapes = self._plan.sharing() if share else self._plan
        self.own_passes = OwnPasses(self.shapes.widths)
        self._launches = Launches(self.workspace, self.config, self.shapes)

    def warm_up(self) -> None:
        """Run every possible shape of a pass and of an image, so that no request waits for kernels to be compiled.

        Call it before the first request.
        """
        passes = self.shapes.at_start(self.canvas_sizes)
        for number, (shape, canvas, first) in enumerate(passes, 1):
            begin = time.monotonic()
            self._warm_up(replace(self._pass(shape, [], canvas), first=first), shape.capacity)
            took, free = time.monotonic() - begin, self.device.memory()[0] / 1e9
            many = len(passes)
            _log.info("warm-up pass %d of %d: %.1f s, %.1f GB free", number, many, took, free)
        if self._sight is not None:
            self._sight.warm_up(self._backend.keep_compiled)

    def _warm_up(self, this: Pass, capacity: int) -> None:
        self.workspace.inputs.view("positions", this.batch, this.length)[:] = -1
        self.workspace.inputs.view("temperature", this.batch)[:] = 1
        self.workspace.inputs.upload()
        for _ in range(_UNTIL_CAPTURED if this.phase == "denoise" else 1):
            self._run(this, [capacity] * len(self.segments[:-1]))
        # If the process is killed, the next start need not compile these kernels again.
        self._backend.keep_compiled()

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
        needs = dict(row.needs)
        self.release(row)
        # `release` cleared the needs. Restore them, so that the block continues later with the same shapes.
        row.needs |= needs
        return hidden, True

    def _fetch(self, row: DeviceRow, hidden: Hidden) -> np.ndarray:
        if not isinstance(hidden, Resident):
            return np.asarray(hidden)
        kept = np.empty((hidden.length, self.config.hidden_size), self.workspace.hidden_dtype)
        assert row.kv_slot is not None
        self.device.download(kept, self.workspace.state + row.kv_slot * self.workspace.row_bytes)
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
        ordered = sorted(inputs, key=lambda item: item.row.kv_slot)
        together = [item for item in ordered if self._shares(item)]
        if self.own_passes.pay([item.row for item in together]):
            return [[item] for item in ordered]
        batches: list[Sequence[InputT]] = [together] if together else []
        return batches + [[item] for item in ordered if not self._shares(item)]

    def _shares(self, item: InputT) -> bool:
        """Return whether a request's pass can use the shared shape, even if the request is alone."""
        if self.rows_apart or isinstance(item, EncodeInput) or item.row.need(0):
            return False
        return len(item.noise) == self.canvas_length

    def _encode_pass(self, batch: Sequence[EncodeInput]) -> None:
        """Encode one request's tokens. If they overload an expert, encode them in halves, or with more expert slots if
        they cannot be split."""
        (item,) = batch
        # Parts of the tokens, each with a flag: whether to use a shape in which no expert can overflow.
        parts = [(item, False)]
        while parts:
            part, roomy = parts.pop(0)
            if self._encode_once(part, roomy):
                continue
            self.counters.overflows += 1
            if len(part.tokens) == 1:
                raise too_full()
            if part.groups is not None or (part.whole and len(part.tokens) <= self.shapes.roomy):
                # An image's tokens attend to each other, so they are not split.
                parts.insert(0, (part, True))
                continue
            parts[:0] = [(half, False) for half in part.halves()]

    def _encode_once(self, item: EncodeInput, roomy: bool) -> bool:
        """Encode tokens in one pass. Return False, and leave the request unchanged, if they overload an expert."""
        row, count = item.row, len(item.tokens)
        # A shared pass may have widened the request's caches.
        self._cache.make_room(row, self._cache.widths[-1] - row.length if roomy else 0)
        shape = self.shapes.without_overflow() if roomy else self.shapes.encode(count, row.width)
        this = replace(self._pass(shape, [row]), pictured=item.groups is not None)
        tokens = np.full((1, this.length), self.config.pad_token_id, np.int64)
        tokens[0, :count] = item.tokens
        space = self.workspace
        positions = space.inputs.view("positions", 1, this.length)
        positions[:] = -1
        positions[0, :count] = np.arange(row.length, row.length + count)
        space.inputs.upload()
        hidden = self.embed(tokens)
        if this.pictured:
            place(space, this, [item], hidden)
        self.device.upload(space.hidden[0], self._as_hidden(hidden))
        if self._run(this, [shape.capacity] * len(self.segments[:-1])) is not None:
            if shape.capacity == this.length:  # every expert already has a slot for every token
                raise too_full()
            return False
        if not item.keep or item.keep(space.last_hidden(1, this.length)[0, :count]):
            self.append(row, this.length, count)
        return True

    def append(self, row: DeviceRow, length: int, count: int) -> None:
        """Append the first `count` tokens of the latest encoding pass to a request's caches. The pass had `length`
        positions."""
        self._cache.make_room(row, count)
        for layer in range(len(self.config.layers)):
            keys, values = self.workspace.new("encode", layer)
            self._cache.append(row, layer, keys, values, length, count)
        row.length, row.hidden = row.length + count, None

    def _denoise_pass(self, batch: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        if not self._shares(batch[0]) or (len(batch) == 1 and self.own_passes.pay([batch[0].row])):
            return [self._denoise_alone(item) for item in batch]
        outputs = self._denoise_shared(batch)
        if outputs is not None:
            return outputs
        self.counters.overflows += 1
        # Whether a request overloads an expert must not depend on other requests, so every request is tried alone.
        return [self._denoise_apart(item, tried=len(batch) == 1) for item in batch]

    def _denoise_apart(self, item: DenoiseInput, tried: bool) -> DenoiseOutput:
        """Denoise one request after a shared pass overloaded an expert. `tried`: the request was alone in that pass."""
        if not tried:
            outputs = self._denoise_shared([item])
            if outputs is not None:
                return outputs[0]
            self.counters.overflows += 1
        for number in range(len(self.segments[:-1])):
            item.row.overload(number, self.shapes.shared().capacity + 1)
        return self._denoise_alone(item)

    def _denoise_shared(self, batch: Sequence[DenoiseInput]) -> list[DenoiseOutput] | None:
        """Denoise whole canvases in one pass. Return None, and leave the requests unchanged, if they overload an
        expert."""
        shape = self.shapes.shared()
        this = self._begin(shape, batch)
        fits = self._run(this, [shape.capacity] * len(self.segments[:-1])) is None
        return self._outputs(this, batch) if fits else None

    def _denoise_alone(self, item: DenoiseInput) -> DenoiseOutput:
        """Denoise one request's canvas.

        If an expert of a segment is overloaded, this segment and all later segments run again with more slots per
        expert. They keep this number of slots until the block ends, so their shapes depend only on this request.
        """
        row: DeviceRow = item.row
        this = self._begin(self.shapes.alone(len(item.noise), self.own_passes.width(row)), [item])
        begin = 0
        while True:
            capacities = [
                self.shapes.alone(this.canvas, this.width, row.need(number)).capacity
                for number in range(len(self.segments[:-1]))
            ]
            over = self._run(this, capacities, begin)
            if over is None:
                return self._outputs(this, [item])[0]
            if capacities[over] == this.length:
                raise too_full()
            self.counters.overflows += 1
            begin, needed = over, int(self.workspace.fullest(over).max())
            # Equal tokens, such as padding, crowd the same experts in every segment, so later segments would overflow,
            # too.
            for number in range(begin, len(capacities)):
                row.overload(number, max(needed, row.need(number)))

    def _begin(self, shape: PassShape, batch: Sequence[DenoiseInput]) -> Pass:
        """Prepare a denoising pass and upload its inputs."""
        space = self.workspace
        head = any(item.outputs != "hidden" for item in batch)
        this = self._pass(shape, [item.row for item in batch], len(batch[0].noise), head)
        for item in batch:
            self._cache.fit(item.row, this.width)
            self._take_hidden(item)
        upload_inputs(space, this, batch)
        size = space.row_bytes
        self._copy(space.hidden[0], space.state + this.first * size, this.batch * size)
        return this

    def _pass(
        self, shape: PassShape, rows: Sequence[DeviceRow], canvas: int = 0, head: bool = True
    ) -> Pass:
        slots = [row.kv_slot for row in rows if row.kv_slot is not None]
        first = 0 if shape.batch > 1 or not slots else slots[0]
        sizes = shape.batch, shape.length, shape.width
        return Pass(shape.phase, first, *sizes, tuple(rows), canvas=canvas, head=head)

    def _take_hidden(self, item: DenoiseInput) -> None:
        """Upload a request's hidden states to its slot, unless they are already there."""
        if not isinstance(item.hidden, Resident):
            address = self.workspace.state + item.row.kv_slot * self.workspace.row_bytes
            self.device.upload(address, self._as_hidden(item.hidden))
        elif item.hidden != Resident(item.row, item.row.hidden, len(item.noise)):
            raise ValueError("these hidden states belong to another request or an earlier step")

    def _as_hidden(self, hidden: Hidden) -> np.ndarray:
        return np.ascontiguousarray(hidden).astype(self.workspace.hidden_dtype)

    def _outputs(self, this: Pass, batch: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        """Return a pass's results. Next hidden states stay on the device."""
        states = None
        if any(item.outputs != "tokens" for item in batch):
            states = self.workspace.last_hidden(this.batch, this.canvas)
        return [self._output(this, item, states) for item in batch]

    def _output(self, this: Pass, item: DenoiseInput, states: np.ndarray | None) -> DenoiseOutput:
        row: DeviceRow = item.row
        space, index = self.workspace, this.index(row)
        hidden = None if states is None or item.outputs == "tokens" else states[index]
        if item.outputs == "hidden":
            return DenoiseOutput(hidden=hidden)
        assert row.kv_slot is not None
        size = space.row_bytes
        self._copy(space.state + row.kv_slot * size, space.next_hidden + index * size, size)
        row.hidden = (row.hidden or 0) + 1
        shape = (this.batch, this.canvas)
        canvas, argmax, entropy, accepted = (
            space.results.view(name, *shape)[index].copy()
            for name in ("canvas", "argmax", "entropy", "accepted")
        )
        return DenoiseOutput(
            canvas, argmax, entropy, accepted, Resident(row, row.hidden, this.canvas), hidden
        )

    def _run(self, this: Pass, capacities: Sequence[int], begin: int = 0) -> int | None:
        """Run the engines one after another, starting with segment `begin`. Return the first segment that overloaded an
        expert, or None.

        The host waits only at the end: overflows are rare, and segments can run again because their inputs are kept.
        """
        self._cache.show_positions(this.first, this.batch)
        for number in range(begin, len(capacities)):
            self._launches.body(number, this, capacities[number])
        if this.head and this.phase == "denoise":
            self._launches.head(this)
        self.workspace.results.download()
        self.device.synchronize()
        # After the first overflow, all later results are wrong.
        over = (n for n, size in enumerate(capacities) if (self.workspace.fullest(n) > size).any())
        return next(over, None)

    def _copy(self, to: int, source: int, size: int) -> None:
        self.device.copy(Pitched(to, size), Pitched(source, size), size, 1)
