"""The interface of backends: segments over host arrays, or engines over device memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from canvasrt.engine_profiles import Profiles

Arrays = dict[str, np.ndarray]


class Segment(Protocol):
    """One compiled graph, without state between calls."""

    @property
    def name(self) -> str: ...

    @property
    def inputs(self) -> frozenset[str]: ...

    @property
    def outputs(self) -> tuple[str, ...]: ...

    def run(self, feeds: Mapping[str, np.ndarray], wanted: Iterable[str] | None = None) -> Arrays:
        """Run the graph over `feeds`, which hold every input. Return the outputs `wanted`, or all
        if None.

        Arrays are C-contiguous, in the graph's dtypes.
        """
        ...


class Backend(Protocol):
    """Opens segments. The bundle's target decides which backend."""

    # True runs one request per pass, so that its tokens cannot depend on what shares its batch.
    rows_apart: bool
    # How many passes may run at the same time.
    max_workers: int
    # How many segments may be loaded at the same time.
    max_loads: int

    def open(self, name: str, file: Path) -> Segment:
        """Load the graph or engine in `file`. Raises CanvasError if it cannot be loaded."""
        ...


class Device(Protocol):
    """Memory that engines read and write, and one queue of work on it.

    All calls except `allocate`, `host` and `synchronize` are queued and happen in order. A host
    array passed to `download` holds its result after the next `synchronize`.
    """

    @property
    def name(self) -> str: ...

    def allocate(self, size: int) -> int:
        """Return the address of `size` zeroed bytes, aligned for any tensor. They live as long as
        the device.

        Raises CanvasError when there is not enough memory.
        """
        ...

    def host(self, size: int) -> np.ndarray:
        """Return `size` bytes of host memory that is fast to copy to and from the device."""
        ...

    def upload(self, address: int, array: np.ndarray) -> None:
        """Queue a copy from host to device. `array` is C-contiguous and must not change before
        `synchronize`."""
        ...

    def download(self, array: np.ndarray, address: int) -> None:
        """Queue a copy from device to host."""
        ...

    def copy(self, to: Pitched, source: Pitched, width: int, height: int) -> None:
        """Queue copies of `height` pieces of `width` bytes each inside the device. They must not
        overlap."""
        ...

    def synchronize(self) -> None:
        """Wait for all queued work. Raises CanvasError if some of it failed."""
        ...

    def memory(self) -> tuple[int, int]:
        """Return the free and all bytes of the device's memory."""
        ...


@dataclass(frozen=True)
class Pitched:
    """Pieces of memory that start `pitch` bytes apart, from `address` on."""

    address: int
    pitch: int


@dataclass(frozen=True)
class EngineCall:
    """One launch of an engine: its tensors' shapes and addresses, by name.

    `dims` are the sizes that determine the shapes, named as in profiles. `repeats` says that the
    same call will likely come again. `place` is the place in the batch whose captures it may use, of which
    each has one; None if capturing it brings little.
    """

    dims: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    addresses: Mapping[str, int]
    repeats: bool
    place: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for equal launches."""
        return (*self.dims.values(), *self.addresses.values())


@dataclass(frozen=True)
class KernelCall:
    """One launch of a kernel of our own: programs along each axis, threads of each, bytes of shared memory, arguments."""

    kernel: int
    grid: tuple[int, int, int]
    threads: int
    shared: int
    arguments: tuple[Any, ...]  # values of ctypes' types


class Engine(Protocol):
    """One compiled graph over device memory, without state between calls."""

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
        """The sizes that the engine was built for."""
        ...

    def prepare(self) -> None:
        """Take the memory that calls need. Called once every engine of the bundle is open."""
        ...

    def launch(self, call: EngineCall) -> None:
        """Queue one run. Raises CanvasError if the engine refuses it."""
        ...


@runtime_checkable
class DeviceBackend(Protocol):
    """Opens engines that share one device's memory and queue."""

    rows_apart: bool

    @property
    def device(self) -> Device: ...

    def open_engine(self, name: str, file: Path, profiles: Any) -> Engine:
        """Load the engine in `file`, built with the manifest's `profiles`; without any, every size
        works.

        Raises CanvasError if it cannot be loaded.
        """
        ...

    def keep_compiled(self) -> None:
        """Keep what was compiled on this machine since the last call, for the next time the bundle is opened."""
        ...
