"""The backends' interfaces: segments over host arrays, or engines over device memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from canvasrt.engine_profiles import Profiles

Arrays = dict[str, np.ndarray]


class Segment(Protocol):
    """One compiled graph over host arrays, which keeps no state between calls."""

    @property
    def name(self) -> str: ...

    @property
    def inputs(self) -> frozenset[str]: ...

    @property
    def outputs(self) -> tuple[str, ...]: ...

    def run(self, feeds: Mapping[str, np.ndarray], wanted: Iterable[str] | None = None) -> Arrays:
        """Run the graph on `feeds`, which must have every input. Return the outputs that `wanted` names, or all outputs
        if `wanted` is None.

        Arrays are C-contiguous and have the graph's dtypes.
        """
        ...


class Backend(Protocol):
    """Opens segments. The bundle's target determines the backend."""

    # True: every pass has one request, so that a request's tokens cannot depend on other requests.
    rows_apart: bool
    # maximum number of concurrent passes
    max_workers: int
    # maximum number of segments that are loaded concurrently
    max_loads: int

    def open(self, name: str, file: Path) -> Segment:
        """Load the graph or engine in `file`. Raises CanvasError if that fails."""
        ...


class Device(Protocol):
    """Memory that engines read and write, and one work queue.

    `upload`, `download` and `copy` are queued, and run in order. `download` has filled its host array after the next
    `synchronize`.
    """

    @property
    def name(self) -> str: ...

    def allocate(self, size: int) -> int:
        """Return the address of `size` zeroed bytes, aligned for any tensor. The memory is freed with the device.

        Raises CanvasError if the device has too little free memory.
        """
        ...

    def host(self, size: int) -> np.ndarray:
        """Return `size` bytes of host memory. Copies between this memory and the device are fast: for a GPU, the memory
        is page-locked."""
        ...

    def upload(self, address: int, array: np.ndarray) -> None:
        """Queue a copy from host to device. `array` is C-contiguous and must not change before
        `synchronize`."""
        ...

    def download(self, array: np.ndarray, address: int) -> None:
        """Queue a copy from device to host."""
        ...

    def copy(self, to: Pitched, source: Pitched, width: int, height: int) -> None:
        """Queue a copy of `height` pieces of `width` bytes inside the device. Source and destination must not
        overlap."""
        ...

    def synchronize(self) -> None:
        """Wait for all queued work. Raises CanvasError if any of the work failed."""
        ...

    def memory(self) -> tuple[int, int]:
        """Return the device's free and total memory, in bytes."""
        ...


@dataclass(frozen=True)
class Pitched:
    """Rows of memory that start `pitch` bytes apart, the first at `address`."""

    address: int
    pitch: int


@dataclass(frozen=True)
class EngineCall:
    """One launch of an engine: its tensors' shapes and addresses, keyed by name.

    `dims` are the sizes that determine the shapes, named as in profiles. `repeats`: whether the same call is likely to
    run again. `place`: a place in the batch, or None if capturing the call as a CUDA graph would gain little. Every
    place keeps one captured graph: its latest call.
    """

    dims: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    addresses: Mapping[str, int]
    repeats: bool
    place: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for identical launches."""
        return (*self.dims.values(), *self.addresses.values())


@dataclass(frozen=True)
class KernelCall:
    """One launch of one of our own kernels. grid: programs per axis. threads: threads per program. shared: size of
    shared memory in bytes."""

    kernel: int
    grid: tuple[int, int, int]
    threads: int
    shared: int
    arguments: tuple[Any, ...]  # ctypes values


class Engine(Protocol):
    """One compiled graph over device memory, which keeps no state between calls."""

    @property
    def name(self) -> str: ...

    @property
    def inputs(self) -> Mapping[str, np.dtype]:
        """The dtype of each input, by name."""
        ...

    @property
    def outputs(self) -> Mapping[str, np.dtype]:
        """The dtype of each output, by name."""
        ...

    @property
    def profiles(self) -> Profiles:
        """The profiles that the engine was built with."""
        ...

    def prepare(self) -> None:
        """Allocate the memory that calls need. Called when all engines of the bundle are open."""
        ...

    def launch(self, call: EngineCall) -> None:
        """Queue one run. Raises CanvasError if the engine refuses the call."""
        ...


@runtime_checkable
class DeviceBackend(Protocol):
    """Opens engines that share one device's memory and queue."""

    rows_apart: bool

    @property
    def device(self) -> Device: ...

    def open_engine(self, name: str, file: Path, profiles: Any) -> Engine:
        """Load the engine in `file`. `profiles` come from the manifest; None means that the engine supports any size.

        Raises CanvasError if that fails.
        """
        ...

    def keep_compiled(self) -> None:
        """Store kernels compiled since the last call, so that the next start need not compile them."""
        ...
