"""A body segment that is cut into several engines ("pieces"). Between the pieces, our own kernels compute the experts
over rows sorted by expert."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from canvasrt.engine_profiles import Profiles
from canvasrt.errors import CanvasError
from canvasrt.graphs.names import (
    CARRIED,
    EXPERT_INDEX,
    EXPERT_INPUT,
    EXPERT_ROWS,
    OUT,
    SHARES,
)
from canvasrt.pass_shapes import BLOCK_ROWS, SLOT_SIZES
from canvasrt.runtime.backends.cuda import CudaDevice
from canvasrt.runtime.bundle_facts import host_dtype
from canvasrt.runtime.engine import Engine, EngineCall, KernelCall
from canvasrt.sorted_rows.description import (
    COUNTS,
    INNER,
    ORDER,
    PROGRAM_OUTPUTS,
    SORT,
    STACK_PARTS,
    KernelImage,
    SortedLayer,
    SortedSegment,
)
from canvasrt.sorted_rows.reference import TOLERATED, TRIAL_TOKENS, Trial

# Tensors that have two buffers: a piece reads one and writes the other.
_KEPT = (*CARRIED, SHARES)
# maximum number of calls whose launches are kept
_CALLS = 256
Launch = Callable[[], object]


class SharedBuffers:
    """Buffers between pieces, and loaded kernels. All segments of a bundle share them, because segments run one
    after another."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._most: dict[str, int] = {}
        self._buffers: dict[str, int] = {}
        self._kernels: dict[tuple[Path, str], int] = {}
        # The kernels of every layer checked so far.
        self.checked: set[tuple[str | None, ...]] = set()

    def reserve(self, needed: Mapping[str, int]) -> None:
        """Plan memory for a segment's buffers. `needed` maps their names to sizes in bytes."""
        for name, size in needed.items():
            self._most[name] = max(size, self._most.get(name, 0))

    def allocate(self) -> None:
        """Allocate the memory. Called when all segments are open."""
        if not self._buffers:
            self._buffers = {name: self.device.allocate(size) for name, size in self._most.items()}

    def address(self, name: str) -> int:
        return self._buffers[name]

    def kernel(self, file: Path, image: KernelImage) -> int:
        key = (file, image.entry)
        if key not in self._kernels:
            data = file.read_bytes()
            self._kernels[key] = self.device.load_kernel(data, image.entry, image.shared)
        return self._kernels[key]


class SortedEngine:
    """The pieces of a body segment as one engine. Ignores expert slots: no expert can overflow, so the output `load`
    stays 0."""

    def __init__(
        self,
        name: str,
        file: Path,
        profiles: Sequence[Mapping[str, Any]],
        open_piece: Callable[[str, Path], Engine],
        between: SharedBuffers,
    ) -> None:
        """Open the pieces of the segment that `file` describes, and upload its experts' weights."""
        self.name, self.profiles = name, Profiles(profiles)
        self._segment, self._folder, self._between = SortedSegment.read(file), file.parent, between
        self._pieces = [
            open_piece(f"{name}.{number}", file.with_name(piece))
            for number, (piece, _) in enumerate(self._segment.pieces)
        ]
        internal = {
            *_KEPT,
            EXPERT_ROWS,
            EXPERT_INPUT,
            EXPERT_INDEX,
            *(each + OUT for each in _KEPT),
        }
        self.inputs = _joined((each.inputs for each in self._pieces), internal)
        self.outputs = _joined((each.outputs for each in self._pieces), internal)
        most = max(each["batch"]["max"] * each["length"]["max"] for each in profiles)
        between.reserve(self._segment.sizes.buffers(most, host_dtype(self._segment.dtype).itemsize))
        self._stored = np.memmap(file.with_name(self._segment.weights), np.uint8, "r")
        self._weights = self._upload(self._stored)
        self._kernels: dict[str, tuple[int, KernelImage]] = {
            kernel: self._load(kernel) for kernel in self._segment.kernels
        }
        self._launches: dict[tuple[Any, ...], list[Launch]] = {}

    def prepare(self) -> None:
        for piece in self._pieces:
            piece.prepare()
        self._between.allocate()
        for layer in self._segment.layers:
            self._check(layer)

    def launch(self, call: EngineCall) -> None:
        launches = self._launches.get(call.key)
        if launches is None:
            if len(self._launches) >= _CALLS:
                self._launches.clear()
            launches = self._launches[call.key] = list(self._plan(call))
        for each in launches:
            each()

    def _check(self, layer: SortedLayer) -> None:
        """Compare the results of a layer's kernels with NumPy's: a wrong kernel would change tokens without an error.
        Layers that use the same kernels are checked only once."""
        kernels = (layer.rounding, layer.gate_up.kernel, layer.down.kernel)
        if kernels in self._between.checked:
            return
        self._between.checked.add(kernels)
        trial, between = Trial(self._segment, layer, self._stored), self._between
        device, positions = between.device, np.arange(TRIAL_TOKENS)
        given = {between.address(EXPERT_INPUT): trial.x, between.address(EXPERT_INDEX): trial.index}
        given[at := device.allocate(positions.nbytes)] = positions
        for address, array in given.items():
            device.upload(address, array)
        for call in self._experts(layer, TRIAL_TOKENS, at):
            device.run_kernel(call)
        shape = (self._segment.sizes.top_k, TRIAL_TOKENS, self._segment.sizes.size)
        found = np.empty(shape, host_dtype(self._segment.dtype))
        device.download(found, between.address(EXPERT_ROWS))
        device.synchronize()
        if not (error := trial.error(found)) <= TOLERATED:
            raise CanvasError(
                f"on {device.name}, our kernels {', '.join(filter(None, kernels))} are wrong: they differ from NumPy by"
                f" {error:.0%}",
                "build with --experts slots, and report it",
            )

    def _upload(self, data: np.ndarray) -> int:
        """Copy the experts' weights to the device; return their address."""
        device = self._between.device
        address = device.allocate(data.nbytes)
        device.upload(address, data)
        device.synchronize()
        return address

    def _load(self, kernel: str) -> tuple[int, KernelImage]:
        here = ".".join(map(str, self._between.device.capability))
        image = self._segment.kernels[kernel].get(here)
        if image is None:
            raise CanvasError(
                f"{self.name} has no kernels for a GPU of compute capability {here}",
                "build for this GPU: `canvasrt targets` lists the names",
            )
        return self._between.kernel(self._folder / image.file, image), image

    def _plan(self, call: EngineCall) -> Iterable[Launch]:
        """Yield a call's launches: the pieces and, between two pieces, a layer's kernels."""
        batch, length, _ = call.shapes["hidden"]
        # Expert slots are left out of `dims`, so that calls that differ only in slots have the same key.
        dims = {name: size for name, size in call.dims.items() if name not in SLOT_SIZES}
        for number, piece in enumerate(self._pieces):
            shapes, addresses = self._tensors(number, call)
            wanted = [*piece.inputs, *piece.outputs]
            own = EngineCall(
                dims,
                {name: shapes[name] for name in wanted},
                {name: addresses[name] for name in wanted},
                call.repeats,
                call.place,
            )
            yield partial(piece.launch, own)
            if number < len(self._segment.layers):
                layer, positions = self._segment.layers[number], call.addresses["positions"]
                for each in self._experts(layer, batch * length, positions):
                    yield partial(self._between.device.run_kernel, each)

    def _tensors(
        self, number: int, call: EngineCall
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """Return the shapes and addresses of all tensors that one piece can read or write."""
        batch, length, size = call.shapes["hidden"]
        choices, address = self._segment.sizes.top_k, self._between.address
        shapes, addresses = dict(call.shapes), dict(call.addresses)
        for name in _KEPT:
            shape = (batch, length, choices if name == SHARES else size)
            shapes |= {name: shape, name + OUT: shape}
            addresses |= {name: address(f"{name}.{number % 2}")}
            addresses |= {name + OUT: address(f"{name}.{(number + 1) % 2}")}
        shapes |= {EXPERT_INPUT: (batch, length, size), EXPERT_INDEX: (batch, length, choices)}
        shapes[EXPERT_ROWS] = (choices, batch, length, size)
        return shapes, addresses | {
            each: address(each) for each in (EXPERT_INPUT, EXPERT_INDEX, EXPERT_ROWS)
        }

    def _experts(self, layer: SortedLayer, tokens: int, positions: int) -> Iterable[KernelCall]:
        """Yield the calls of a layer's kernels: the sort, the quantization (unless the piece does it), and both matrix
        products."""
        sizes, address = self._segment.sizes, self._between.address
        rows = [address(ORDER), address(COUNTS)]
        (sort,) = (name for name in self._kernels if name.startswith(SORT))
        pointers = [address(EXPERT_INDEX), positions, *rows]
        yield self._call(sort, (sizes.experts, 1, 1), pointers, tokens)
        taken = EXPERT_INPUT
        if layer.rounding:
            # The quantized input shares the experts' result buffer, which is written only after the input's last read.
            taken, pointers = EXPERT_ROWS, [address(EXPERT_INPUT), address(EXPERT_ROWS)]
            grid = (-(-tokens // BLOCK_ROWS), -(-sizes.size // PROGRAM_OUTPUTS), 1)
            yield self._call(layer.rounding, grid, pointers, tokens, layer.input_scale)
        blocks = sizes.blocks(tokens)
        for stack, outputs, source, to, written in (
            (layer.gate_up, sizes.inner, taken, INNER, layer.inner_scale),
            (layer.down, sizes.size, INNER, EXPERT_ROWS, 1.0),
        ):
            parts = [self._weights + getattr(stack, part)[0] for part in STACK_PARTS]
            pointers = [address(source), *parts, *rows, address(to)]
            grid = (blocks, -(-outputs // PROGRAM_OUTPUTS), 1)
            yield self._call(stack.kernel, grid, pointers, tokens, written)

    def _call(
        self, name: str, grid: tuple[int, int, int], pointers: list[int], tokens: int, *scale: float
    ) -> KernelCall:
        kernel, image = self._kernels[name]
        given = kernel_arguments(pointers, tokens, *scale)
        return KernelCall(kernel, grid, image.threads, image.shared, given)


def kernel_arguments(pointers: Sequence[int], tokens: int, *scale: float) -> tuple[Any, ...]:
    """Return a kernel's arguments: addresses, the number of tokens, and the scale of its results, if any."""
    arguments = [*map(ctypes.c_void_p, pointers), ctypes.c_int32(tokens)]
    # The compiler adds two parameters for scratch memory, which these kernels do not use.
    return (*arguments, *map(ctypes.c_float, scale), ctypes.c_void_p(0), ctypes.c_void_p(0))


def _joined(tensors: Iterable[Mapping[str, np.dtype]], internal: set[str]) -> dict[str, np.dtype]:
    """Return the pieces' tensors, keyed by name, except for those that are internal to the segment."""
    return {name: dtype for each in tensors for name, dtype in each.items() if name not in internal}
