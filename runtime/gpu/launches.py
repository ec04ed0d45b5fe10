"""Launches a pass's engines: sets tensor shapes and addresses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.defaults import OCTET
from canvasrt.errors import EngineError
from canvasrt.pass_shapes import PassPlan, PassShape, round_up
from canvasrt.runtime.engine import EngineCall
from canvasrt.runtime.gpu.device_cache import DeviceRow
from canvasrt.runtime.gpu.workspace import Workspace
from canvasrt.runtime.passes import DenoiseInput

# maximum number of EngineCall objects to keep
_CALLS = 1024


@dataclass(frozen=True)
class Pass:
    """One pass over `batch` contiguous kv slots, starting with `first`. Only the requests in `rows` use the results.

    `width`: number of cached tokens that full layers read per request, including padding.
    """

    phase: str
    first: int
    batch: int
    length: int
    width: int
    rows: tuple[DeviceRow, ...]
    pictured: bool = False  # whether some tokens belong to images
    canvas: int = 0  # number of tokens per request for the head; the rest of `length` is padding
    head: bool = True  # whether a denoising pass runs the head

    def index(self, row: DeviceRow) -> int:
        """Return a request's index in the batch."""
        assert row.kv_slot is not None
        return row.kv_slot - self.first


@dataclass(frozen=True)
class OwnPasses:
    """Chooses between own passes (of one request) and shared passes.

    `widths`: all possible widths. `seconds`: durations of own passes, keyed by ascending width; a width is left out if
    its results differ from a shared pass's results in any bit. `shared`: a shared pass's duration.
    """

    widths: tuple[int, ...]
    seconds: Mapping[int, float] = field(default_factory=dict)
    shared: float = 0.0

    def width(self, row: DeviceRow) -> int:
        """Return the smallest width that suffices for a request's own pass. Widths that give the same bits as a shared
        pass are preferred."""
        least = round_up(row.length, self.widths)
        return next((width for width in self.seconds if width >= least), least)

    def pay(self, rows: Sequence[DeviceRow]) -> bool:
        """Return whether own passes give the requests the same bits as a shared pass, in less time. A single
        request's own pass is assumed to take less time."""
        total = sum(self.seconds.get(self.width(row), math.inf) for row in rows)
        return total < (self.shared if len(rows) > 1 else math.inf)


class Launches:
    """Launches the engines of passes. Reuses EngineCall objects, so that identical launches can be captured."""

    def __init__(self, space: Workspace, config: ModelConfig, plan: PassPlan) -> None:
        self._space, self._config, self.plan = space, config, plan
        self._calls: dict[tuple[Any, ...], EngineCall] = {}

    def body(self, number: int, this: Pass, capacity: int) -> None:
        """Launch a body segment with `capacity` slots per expert."""
        where = (this.phase, this.pictured, this.first, this.batch, this.length)
        key = (number, *where, capacity, this.width)
        engine = self._space.segments[number].engine
        call = self._calls.get(key)
        if call is None:
            dims = {"batch": this.batch, "length": this.length}
            shared = engine.profiles.smallest("gate_queues", dims) == 1
            made = body_call(self._space, self._config, number, this, capacity, shared)
            call = self._remember(key, replace(made, place=self._place(this, capacity)))
        engine.launch(call)

    def head(self, this: Pass) -> None:
        """Launch the head."""
        key = ("head", this.batch, this.canvas)
        call = self._calls.get(key)
        if call is None:
            place = None if this.canvas < self.plan.canvas else 0
            made = head_call(self._space, self._config, this)
            call = self._remember(key, replace(made, place=place))
        self._space.segments[-1].engine.launch(call)

    def _place(self, this: Pass, capacity: int) -> int | None:
        """Return a body's `EngineCall.place`: None for unusual shapes, because capturing them would gain little."""
        usual = self.plan.shared() if this.batch > 1 else self.plan.denoise(this.width)
        shape = PassShape(this.phase, this.batch, this.length, capacity, this.width)
        return this.first if shape == usual else None

    def _remember(self, key: tuple[Any, ...], call: EngineCall) -> EngineCall:
        if len(self._calls) >= _CALLS:
            self._calls.clear()
        self._calls[key] = call
        return call


def upload_inputs(space: Workspace, this: Pass, batch: Sequence[DenoiseInput]) -> None:
    """Queue the upload of a denoising pass's positions, noise and temperatures."""
    positions = space.inputs.view("positions", this.batch, this.length)
    noise = space.inputs.view("noise", this.batch, this.canvas)
    uniforms = space.inputs.view("uniforms", this.batch, this.canvas)
    temperature = space.inputs.view("temperature", this.batch)
    bound = space.inputs.view("entropy_bound", this.batch)
    # Reset idle rows and padding, which hold stale data; their results are not read.
    positions[:], noise[:], uniforms[:] = -1, 0, 0
    temperature[:], bound[:] = 1, 0
    for item in batch:
        index, begin = this.index(item.row), item.row.length
        positions[index, : this.canvas] = np.arange(begin, begin + this.canvas)
        noise[index], uniforms[index] = item.noise, item.uniforms
        temperature[index], bound[index] = item.temperature, item.entropy_bound
    space.inputs.upload()


def body_call(
    space: Workspace, config: ModelConfig, number: int, this: Pass, capacity: int, shared: bool
) -> EngineCall:
    """Return a body segment's launch. `shared`: whether every expert's first matrix product covers all tokens."""
    segment, cache = space.segments[number], space.cache
    tokens = (this.batch, this.length)
    states = (*tokens, config.hidden_size)
    held = {
        kind: this.width if kind == "full" else past.most
        for kind, past in cache.past.items()
        if f"past_positions_{kind}" in segment.engine.inputs
    }
    gate_rows = this.batch * this.length if shared else capacity
    queues = 1 if shared else config.num_experts
    tensors = {
        "hidden": (states, space.hidden[number]),
        "positions": (tokens, space.inputs.address("positions")),
        "groups": (tokens, space.pictures.address("groups") if this.pictured else space.groups),
        "causal": ((this.batch,), space.causal[this.phase]),
        "slots": ((capacity,), space.slots),
        "gate_slots": ((gate_rows,), space.slots),
        "gate_queues": ((queues,), space.all_tokens if shared else space.queues),
        "hidden_out": (states, space.hidden[number + 1]),
        "load": ((len(segment.layers),), space.results.address(f"load_{number}")),
    }
    for kind, width in held.items():
        places = (this.batch, width // OCTET, OCTET)
        tensors[f"past_positions_{kind}"] = (places, cache.positions(kind, this.first))
    for layer in segment.layers:
        each = config.layers[layer]
        past = (
            this.batch,
            each.num_kv_heads,
            held[each.kind] // OCTET,
            OCTET,
            each.head_dim,
        )
        new = (this.batch, each.num_kv_heads, this.length, each.head_dim)
        keys, values = space.new(this.phase, layer)
        tensors[f"past_key_{layer}"] = (past, cache.key(layer, this.first))
        tensors[f"past_value_{layer}"] = (past, cache.value(layer, this.first))
        tensors[f"new_key_{layer}"] = (new, keys)
        tensors[f"new_value_{layer}"] = (new, values)
    dims = {"batch": this.batch, "length": this.length, "capacity": capacity}
    dims |= {"gate_rows": gate_rows, "gate_queues": queues}
    dims |= {f"octets_{kind}": width // OCTET for kind, width in held.items()}
    return _call(dims, tensors, this.phase == "denoise")


def head_call(space: Workspace, config: ModelConfig, this: Pass) -> EngineCall:
    """Return the launch of the head."""
    tokens = (this.batch, this.canvas)
    states = (*tokens, config.hidden_size)
    tensors = {
        "hidden": (states, space.hidden[-1]),
        "temperature": ((this.batch,), space.inputs.address("temperature")),
        "entropy_bound": ((this.batch,), space.inputs.address("entropy_bound")),
        "uniforms": (tokens, space.inputs.address("uniforms")),
        "noise": (tokens, space.inputs.address("noise")),
        "next_hidden": (states, space.next_hidden),
    }
    for name in ("canvas", "argmax", "entropy", "accepted"):
        tensors[name] = (tokens, space.results.address(name))
    return _call({"batch": this.batch, "length": tokens[1]}, tensors, repeats=True)


def _call(
    dims: dict[str, int], tensors: dict[str, tuple[tuple[int, ...], int]], repeats: bool
) -> EngineCall:
    shapes = {name: shape for name, (shape, _) in tensors.items()}
    addresses = {name: address for name, (_, address) in tensors.items()}
    return EngineCall(dims, shapes, addresses, repeats)


def too_full() -> EngineError:
    """Return the error for a request that overloads an expert even if it runs alone with the most slots per expert."""
    return EngineError(
        "one request routed more tokens to an expert than the expert has slots",
        "build the bundle again with this version",
    )
