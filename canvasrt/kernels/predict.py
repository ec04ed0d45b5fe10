"""Predicts how long a pass takes on a GPU, from the engines' kernel lists, and the floor below that."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from canvasrt.bundle import Bundle
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.defaults import OCTET, SLOTTED, octets
from canvasrt.engine_profiles import Profiles
from canvasrt.errors import CanvasError, UsageError
from canvasrt.kernels import store
from canvasrt.kernels.cost import BITS, SORTED_PRODUCT, Cost, costs, launches, weight
from canvasrt.kernels.dims import evaluate, volume
from canvasrt.kernels.group import EXPERTS, Place, places
from canvasrt.kernels.parse import Kernel
from canvasrt.kernels.rates import GpuRates
from canvasrt.pass_shapes import (
    BLOCK_ROWS,
    DENOISE,
    ENCODE,
    ROOMY,
    in_units,
    round_up,
    usual_capacity,
    widths,
)

# Denoising steps that a block is assumed to take.
PREDICTED_STEPS = 16


@dataclass(frozen=True)
class CallSizes:
    """A call's sizes: `batch` requests of `length` tokens, each with `context` cached; `capacity` slots per expert."""

    batch: int
    length: int
    context: int
    capacity: int

    def dims(self, model: ModelConfig, most: int, shared: bool = False) -> dict[str, int]:
        """Return the sizes by dimension name, padded as the runtime does for engines of up to `most` cached tokens.

        With `shared`, every expert's first product takes all tokens.
        """
        most = max(most, in_units(self.context))
        return {
            "batch": self.batch,
            "length": self.length,
            "capacity": self.capacity,
            "gate_rows": self.batch * self.length if shared else self.capacity,
            "gate_queues": 1 if shared else model.num_experts,
            "routed_rows": self._routed_rows(model),
            "sorted_rows": self._sorted_rows(model),
            "octets_full": octets(round_up(self.context, widths(most))),
            "octets_sliding": octets(in_units(min(most, model.sliding_window - 1))),
        }

    def _routed_rows(self, model: ModelConfig) -> int:
        """Return the rows that the experts compute, one per token and expert of it."""
        return self.batch * self.length * model.top_k_experts

    def _sorted_rows(self, model: ModelConfig) -> int:
        """Return the rows that fill the experts' blocks with even routing: each expert's last block is half empty."""
        rows = self._routed_rows(model)
        return rows + min(rows, model.num_experts) * BLOCK_ROWS // 2


@dataclass(frozen=True)
class TimedKernel:
    """One kernel of a pass and what it costs."""

    segment: str
    kernel: Kernel
    place: Place
    cost: Cost
    seconds: float


@dataclass
class PredictedPass:
    """One pass's kernels in order, over all its segments."""

    kind: str
    sizes: CallSizes
    rows: list[TimedKernel] = field(default_factory=list)
    floor_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum over the kernels: they run one after another."""
        return sum(row.seconds for row in self.rows)

    def segments(self) -> dict[str, float]:
        """Seconds by segment."""
        return _sums(self.rows, lambda row: row.segment)

    def parts(self) -> dict[str, float]:
        """Seconds by part of the network."""
        return _sums(self.rows, lambda row: row.place.part)


def _sums(rows: Sequence[TimedKernel], key: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        found[key(row)] = found.get(key(row), 0.0) + row.seconds
    return found


class Predictor:
    """The kernel lists of a bundle's engines, read once."""

    def __init__(self, bundle: Bundle, repeat: Mapping[int | None, int] | None = None) -> None:
        """Read the lists. Raises CanvasError if an engine has none.

        `repeat` lets a few layers stand for many: how often each layer's kernels count; None is for a body segment's
        kernels outside its layers.
        """
        manifest = bundle.manifest
        self.repeat = dict(repeat or {})
        self.model = manifest.model
        self.capabilities: str = (manifest.target or {}).get("compute_capability", "")
        self.experts: str = manifest.options.get("experts", SLOTTED)
        self.entries = {entry["name"]: entry for entry in manifest.segments}
        without = [name for name, entry in self.entries.items() if "kernels" not in entry]
        if manifest.kind != "engines" or without:
            raise CanvasError(
                f"{bundle.path} has no kernel lists",
                "only TensorRT-RTX's builder writes them: build for an RTX target with this version",
            )
        self.lists = {
            name: store.read(bundle.file(entry["kernels"])) for name, entry in self.entries.items()
        }

    def denoise(
        self, gpu: GpuRates, batch: int, context: int, capacity: int | None = None
    ) -> PredictedPass:
        """Return a denoising pass of `batch` canvases: every body segment and the head.

        A pass that requests share always has as many rows as its engines take; those without a request are padding.
        """
        length, batch = self.model.canvas_length, self._rows(batch)
        capacity = capacity or usual_capacity(self.model, batch * length)
        sizes = CallSizes(batch, length, context, capacity)
        return self._pass(DENOISE, gpu, sizes, [*self._bodies(), "head"])

    def encode(
        self, gpu: GpuRates, batch: int, length: int, context: int, capacity: int | None = None
    ) -> PredictedPass:
        """Return an encoding pass of `length` clean tokens per request: only the body segments.

        The runtime encodes one request at a time, and up to `ROOMY` tokens with a slot for each.
        """
        roomy = batch == 1 and length <= ROOMY
        capacity = capacity or (length if roomy else usual_capacity(self.model, batch * length))
        sizes = CallSizes(batch, length, context, capacity)
        return self._pass(ENCODE, gpu, sizes, self._bodies())

    def block_seconds(
        self, gpu: GpuRates, batch: int, context: int, capacity: int | None = None
    ) -> float:
        """Return the seconds for one block of every request: `PREDICTED_STEPS` denoising steps, and the results encoded
        one by one."""
        denoised = self.denoise(gpu, batch, context, capacity).seconds
        encoded = self.encode(gpu, 1, self.model.canvas_length, context).seconds
        return PREDICTED_STEPS * denoised + batch * encoded

    def check_capacity(self, batch: int, capacity: int) -> None:
        """Raise UsageError if so many slots per expert cannot hold a pass's tokens, or if the engines take fewer.

        Whether they take such a batch is for the pass to say.
        """
        sizes = {"batch": self._rows(batch), "length": self.model.canvas_length}
        taken = (Profiles(self.entries[name]["profiles"]) for name in self._bodies())
        tokens = math.prod(sizes.values())
        most = min(tokens, *(each.largest("capacity", sizes) for each in taken))
        least = -(-tokens * self.model.top_k_experts // self.model.num_experts)
        if most and not least <= capacity <= most:
            raise UsageError(
                f"{capacity} slots per expert do not suit a pass of {tokens} tokens",
                f"give at least {least}, which even routing fills, and at most {most}",
            )

    def _rows(self, batch: int) -> int:
        """Return the rows of a pass of `batch` canvases; `batch` itself if the engines do not take so many."""
        each = (p["batch"] for name in self._bodies() for p in self.entries[name]["profiles"])
        return min((rows["max"] for rows in each if batch <= rows["max"]), default=batch)

    def _most(self) -> int:
        """Return the tokens that the engines take of a full layer's past."""
        return OCTET * max(self._largest("octets_full"), default=0)

    def _largest(self, name: str) -> list[int]:
        """Return the largest size of a dimension in each profile that has it."""
        each = (p for entry in self.entries.values() for p in entry.get("profiles", ()))
        return [p[name]["max"] for p in each if name in p]

    def _bodies(self) -> list[str]:
        return [name for name, entry in self.entries.items() if "layers" in entry]

    def _pass(
        self, kind: str, gpu: GpuRates, sizes: CallSizes, segments: Sequence[str]
    ) -> PredictedPass:
        made = PredictedPass(kind, sizes)
        for name in segments:
            kernels, dims = self._program(name, sizes)
            found = places(kernels, name, self.entries[name].get("layers", ()))
            for kernel, place, cost in zip(kernels, found, costs(kernels, dims), strict=True):
                if launches(kernel):
                    seconds = gpu.seconds(cost.moved, cost.operations, cost.format)
                    times = 1 if name == "head" else self.repeat.get(place.layer, 1)
                    made.rows += [TimedKernel(name, kernel, place, cost, seconds)] * times
        made.floor_seconds = self._floor(made, gpu)
        return made

    def _program(self, segment: str, sizes: CallSizes) -> tuple[Sequence[Kernel], dict[str, int]]:
        """Return the kernels and the dimensions of such a call, with the profile that the runtime picks."""
        profiles = self.entries[segment]["profiles"]
        for shared in (True, False):
            dims = sizes.dims(self.model, self._most(), shared)
            picked = Profiles(profiles).pick(dims)
            if picked is not None:
                return self.lists[segment].programs[profiles[picked]["name"]], dims
        raise UsageError(
            f"the engines take no pass of batch {sizes.batch} with {sizes.length} tokens and {sizes.context} cached ones"
            f" per request, and {sizes.capacity} slots per expert",
            f"they take up to batch {max(self._largest('batch'))}, and {self._most()} cached tokens",
        )

    def _floor(self, made: PredictedPass, gpu: GpuRates) -> float:
        """Return the longer of reading weights and caches once, and computing the necessary products at the peak rate.

        Of the experts' products only the rows with routed tokens are necessary, whatever the capacity that holds them.
        """
        sizes, model = made.sizes, self.model
        dims = sizes.dims(model, self._most())
        needed = dims["routed_rows"]
        computing = sum(
            row.cost.operations
            * (min(1.0, needed / _computed_rows(row, dims)) if row.place.part == EXPERTS else 1.0)
            / gpu.rate(row.cost.format)
            for row in made.rows
            if row.cost.is_product
        )
        read = weight_bytes(made.rows) + cached_bytes(made.rows, dims)
        return max(read / gpu.bytes_per_second(), computing)


def _computed_rows(row: TimedKernel, dims: Mapping[str, int]) -> int:
    """Return the rows that a product computes: all that it writes, or its whole blocks of sorted ones."""
    if row.kernel.kind == SORTED_PRODUCT:
        return evaluate(row.kernel.inputs[0].dims[0], dims)
    written = row.kernel.outputs[0].dims
    return volume(written, dims) // evaluate(written[-1], dims)


def weight_bytes(rows: Sequence[TimedKernel]) -> float:
    """Return the bytes of these kernels' weight matrices and scales; the head's table counts once."""
    total, tables = 0.0, {}
    for row in rows:
        if not row.cost.is_product:
            continue
        count = sum(volume(each.dims, {}) * BITS[each.dtype] / 8 for each in row.kernel.constants)
        matrix = weight(row.kernel)
        if row.segment == "head" and matrix is not None:
            # Projection and self-conditioning multiply by the same table, one of them by its transpose.
            tables[tuple(sorted(map(str, matrix.dims)))] = count
        else:
            total += count
    return total + sum(tables.values())


def cached_bytes(rows: Sequence[TimedKernel], dims: Mapping[str, int]) -> float:
    """Return the bytes of the cached keys and values that a pass reads, each once per layer: in a full layer, several
    kernels read the same values."""
    reads: dict[tuple[str, str], Counter[str]] = {}
    counts: dict[tuple[str, str], float] = {}
    for row in rows:
        for name, each in {each.name: each for each in row.kernel.inputs}.items():
            if name.startswith(("past_key_", "past_value_")):
                # A row that stands for several layers comes as often.
                reads.setdefault((row.segment, name), Counter())[row.kernel.name] += 1
                count = volume(each.dims, dims) * BITS[each.dtype] / 8
                counts[row.segment, name] = max(count, counts.get((row.segment, name), 0.0))
    return sum(counts[key] * max(layers.values()) for key, layers in reads.items())
