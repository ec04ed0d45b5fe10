"""Predicts how long a pass takes on a GPU, and its floor, the least possible time, from the engines' kernel lists."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from canvasrt.bundle import Bundle
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.defaults import SLOTTED, octets
from canvasrt.engine_profiles import Profiles, passes_of
from canvasrt.errors import CanvasError, UsageError
from canvasrt.pass_shapes import (
    BLOCK_ROWS,
    DENOISE,
    ENCODE,
    PassPlan,
    in_units,
    round_up,
)
from canvasrt.roofline import store
from canvasrt.roofline.cost import BITS, SORTED_PRODUCT, Cost, costs, launches, weight
from canvasrt.roofline.dims import evaluate, volume
from canvasrt.roofline.group import EXPERTS, Place, place_of
from canvasrt.roofline.parse import Kernel
from canvasrt.roofline.rates import GpuRates

# Assumed denoising steps per block.
PREDICTED_STEPS = 16


@dataclass(frozen=True)
class CallSizes:
    """A call's sizes: `batch` requests of `length` tokens after `context` cached tokens, with `capacity` slots per
    expert."""

    batch: int
    length: int
    context: int
    capacity: int

    def dims(self, model: ModelConfig, passes: PassPlan, shared: bool = False) -> dict[str, int]:
        """Return the sizes by dimension name. The context is padded as in the runtime; if it exceeds the engines'
        limit, it is only rounded up to a cache width.

        With `shared`, every expert's first product takes all tokens.
        """
        widths = (*passes.widths, max(passes.widths[-1], in_units(self.context)))
        # The experts must compute one row per token for each expert that the token is routed to. With even routing,
        # every expert's last block of sorted rows is half empty on average.
        routed = self.batch * self.length * model.top_k_experts
        half_blocks = min(routed, model.num_experts) * BLOCK_ROWS // 2
        return {
            "batch": self.batch,
            "length": self.length,
            "capacity": self.capacity,
            "gate_rows": self.batch * self.length if shared else self.capacity,
            "gate_queues": 1 if shared else model.num_experts,
            "routed_rows": routed,
            "sorted_rows": routed + half_blocks,
            "octets_full": octets(round_up(self.context, widths)),
            "octets_sliding": octets(passes.window),
        }


@dataclass(frozen=True)
class TimedKernel:
    """One kernel of a pass, and its cost."""

    segment: str
    kernel: Kernel
    place: Place
    cost: Cost
    seconds: float


@dataclass
class PredictedPass:
    """One pass: the kernels of all its segments, in the order in which they run."""

    kind: str
    sizes: CallSizes
    rows: list[TimedKernel] = field(default_factory=list)
    floor_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of the kernels' times, because kernels run one after another."""
        return sum(row.seconds for row in self.rows)

    def parts(self) -> dict[str, float]:
        """Return the seconds that each part of the network takes."""
        found: dict[str, float] = {}
        for row in self.rows:
            found[row.place.part] = found.get(row.place.part, 0.0) + row.seconds
        return found


class Predictor:
    """Predicts passes from the kernel lists of a bundle's engines, which it reads once."""

    def __init__(self, bundle: Bundle, repeat: Mapping[int | None, int] | None = None) -> None:
        """Read the lists. Raises CanvasError if an engine has no list.

        `repeat` maps a layer's index to how often that layer's kernels count, so that few layers can represent many.
        The key None is for a body segment's kernels outside of layers.
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
                "only TensorRT-RTX's builder writes kernel lists: build for an RTX target with this version",
            )
        self.passes = passes_of(manifest)
        self.lists = {
            name: store.read(bundle.file(entry["kernels"])) for name, entry in self.entries.items()
        }

    def denoise(
        self, gpu: GpuRates, batch: int, context: int, capacity: int | None = None
    ) -> PredictedPass:
        """Return a denoising pass of `batch` canvases, through every body segment and the head.

        A shared pass always has the engines' maximum number of rows; unused rows are padding.
        """
        rows = self._rows(batch)
        usual = self.passes.canvas_rows[0] if rows == 1 else self.passes.batch_rows
        sizes = CallSizes(rows, self.passes.canvas, context, capacity or usual)
        return self._pass(DENOISE, gpu, sizes, [*self._bodies(), "head"])

    def encode(self, gpu: GpuRates, context: int, length: int | None = None) -> PredictedPass:
        """Return a pass that encodes one request's finished canvas, or `length` tokens, through the body segments."""
        # At the narrowest width, because wider passes pad the shortest lengths.
        shape = self.passes.encode(length or self.passes.canvas, self.passes.widths[0])
        sizes = CallSizes(1, shape.length, context, shape.capacity)
        return self._pass(ENCODE, gpu, sizes, self._bodies())

    def block_seconds(
        self, gpu: GpuRates, batch: int, context: int, capacity: int | None = None
    ) -> float:
        """Return the seconds that one block of every request takes: `PREDICTED_STEPS` denoising steps, then an encoding
        pass per request."""
        denoised = self.denoise(gpu, batch, context, capacity).seconds
        encoded = self.encode(gpu, context).seconds
        return PREDICTED_STEPS * denoised + batch * encoded

    def check_capacity(self, batch: int, capacity: int) -> None:
        """Raise UsageError if experts have no slots, or if `capacity` slots per expert are too few for a pass's tokens,
        more than its tokens, or more than the engines accept.

        `denoise` checks whether the engines accept the batch.
        """
        if self.experts != SLOTTED:
            raise UsageError(
                "--capacity has no effect: the bundle's experts have sorted rows, not slots",
                "leave --capacity out",
            )
        sizes = {"batch": self._rows(batch), "length": self.model.canvas_length}
        taken = (Profiles(self.entries[name]["profiles"]) for name in self._bodies())
        tokens = math.prod(sizes.values())
        most = min(tokens, *(each.largest("capacity", sizes) for each in taken))
        least = -(-tokens * self.model.top_k_experts // self.model.num_experts)
        if most and not least <= capacity <= most:
            raise UsageError(
                f"{capacity} slots per expert do not suit a pass of {tokens} tokens",
                f"give at least {least} (enough for even routing), and at most {most}",
            )

    def _rows(self, batch: int) -> int:
        """Return how many rows a pass of `batch` canvases has: the engines' limit if 1 < batch <= limit, otherwise
        `batch`."""
        return self.passes.batch if 1 < batch <= self.passes.batch else batch

    def _bodies(self) -> list[str]:
        return [name for name, entry in self.entries.items() if "layers" in entry]

    def _pass(
        self, kind: str, gpu: GpuRates, sizes: CallSizes, segments: Sequence[str]
    ) -> PredictedPass:
        made = PredictedPass(kind, sizes)
        for name in segments:
            kernels, dims = self._program(name, sizes)
            layers = self.entries[name].get("layers", ())
            found = [place_of(kernel, name, layers) for kernel in kernels]
            for kernel, place, cost in zip(kernels, found, costs(kernels, dims), strict=True):
                if launches(kernel):
                    seconds = gpu.seconds(cost.moved, cost.operations, cost.format)
                    times = 1 if name == "head" else self.repeat.get(place.layer, 1)
                    made.rows += [TimedKernel(name, kernel, place, cost, seconds)] * times
        made.floor_seconds = self._floor(made, gpu)
        return made

    def _program(self, segment: str, sizes: CallSizes) -> tuple[Sequence[Kernel], dict[str, int]]:
        """Return the kernels of the profile that the runtime picks for these sizes, and the sizes by dimension name."""
        profiles = self.entries[segment]["profiles"]
        for shared in (True, False):
            dims = sizes.dims(self.model, self.passes, shared)
            picked = Profiles(profiles).pick(dims)
            if picked is not None:
                return self.lists[segment][profiles[picked]["name"]], dims
        raise UsageError(
            f"the engines accept no pass of batch {sizes.batch} with {sizes.length} tokens and {sizes.context} cached"
            f" tokens per request, and {sizes.capacity} slots per expert",
            f"they accept batches of up to {self.passes.batch}, and up to {self.passes.widths[-1]} cached tokens",
        )

    def _floor(self, made: PredictedPass, gpu: GpuRates) -> float:
        """Return the longer of two times: reading weights and caches once, and computing the necessary products at the
        peak rate.

        In the experts' products, only rows of routed tokens are necessary, regardless of the capacity.
        """
        sizes, model = made.sizes, self.model
        dims = sizes.dims(model, self.passes)
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
    """Return the number of rows that a product computes: all rows that it writes; in a sorted product, all rows of its
    blocks."""
    if row.kernel.kind == SORTED_PRODUCT:
        return evaluate(row.kernel.inputs[0].dims[0], dims)
    written = row.kernel.outputs[0].dims
    return volume(written, dims) // evaluate(written[-1], dims)


def weight_bytes(rows: Sequence[TimedKernel]) -> float:
    """Return the size in bytes of these kernels' weight matrices and scales. The head's table counts only once."""
    total, tables = 0.0, {}
    for row in rows:
        if not row.cost.is_product:
            continue
        count = sum(volume(each.dims, {}) * BITS[each.dtype] / 8 for each in row.kernel.constants)
        matrix = weight(row.kernel)
        if row.segment == "head" and matrix is not None:
            # Self-conditioning and the projection multiply by the same table, one of them by its transpose.
            tables[tuple(sorted(map(str, matrix.dims)))] = count
        else:
            total += count
    return total + sum(tables.values())


def cached_bytes(rows: Sequence[TimedKernel], dims: Mapping[str, int]) -> float:
    """Return the size in bytes of the cached keys and values that a pass reads. Each counts once per layer, although
    several kernels of a full layer read the same values."""
    reads: dict[tuple[str, str], Counter[str]] = {}
    counts: dict[tuple[str, str], float] = {}
    for row in rows:
        for name, each in {each.name: each for each in row.kernel.inputs}.items():
            if name.startswith(("past_key_", "past_value_")):
                # A kernel that represents several layers counts several times.
                reads.setdefault((row.segment, name), Counter())[row.kernel.name] += 1
                count = volume(each.dims, dims) * BITS[each.dtype] / 8
                counts[row.segment, name] = max(count, counts.get((row.segment, name), 0.0))
    return sum(counts[key] * max(layers.values()) for key, layers in reads.items())
