"""What the runtime asks of a backend: segments over arrays of the host, or engines over a device's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from canvasrt.runtime.profiles import Profiles

Arrays = dict[str, np.ndarray]


class Segment(Protocol):
    """One compiled graph. It keeps no state between calls."""

    @property
    def name(self) -> str: ...

    @property
    def inputs(self) -> frozenset[str]: ...

    @property
    def outputs(self) -> tuple[str, ...]: ...

    def run(self, feeds: Mapping[str, np.ndarray], wanted: Iterable[str] | None = None) -> Arrays:
        """Runs the graph over `feeds`, which hold every input, and returns the outputs `wanted`
        (all of them when None). Arrays are C-contiguous; dtypes are those of the graph."""
        ...


class Backend(Protocol):
    """Opens segments. A backend is chosen by the bundle's target."""

    # True: a request a pass, where one request's results may change in the last bits with what
    # shares its batch and its tokens must not change.
    rows_apart: bool
    # How many passes may run at the same time.
    max_workers: int

    def open(self, name: str, file: Path) -> Segment:
        """Loads the graph or engine in `file`. CanvasError when it cannot be loaded."""
        ...


class Device(Protocol):
    """Memory that engines read and write, and one queue of work on it.

    Everything but `allocate`, `host` and `synchronize` is queued: it happens in order, and an array of
    the host that was given to `download` holds its result after the next `synchronize`.
    """

    @property
    def name(self) -> str: ...

    def allocate(self, size: int) -> int:
        """The address of `size` bytes, all zero, aligned for any tensor. CanvasError when there is
        no such room. They are given back with the device."""
        ...

    def host(self, size: int) -> np.ndarray:
        """`size` bytes of the host that copies to and from the device are fast with."""
        ...

    def upload(self, address: int, array: np.ndarray) -> None:
        """Host to device. `array` is C-contiguous and may change after the next `synchronize`."""
        ...

    def download(self, array: np.ndarray, address: int) -> None:
        """Device to host."""
        ...

    def copy(self, to: Pitched, source: Pitched, width: int, height: int) -> None:
        """`height` pieces of `width` bytes each, inside the device; they do not overlap."""
        ...

    def synchronize(self) -> None:
        """Waits for all that was queued. CanvasError when some of it failed."""
        ...


@dataclass(frozen=True)
class Pitched:
    """Pieces of memory `pitch` bytes apart, from `address` on."""

    address: int
    pitch: int


@dataclass(frozen=True)
class Call:
    """One launch of an engine: its tensors' shapes and addresses, by name.

    `dims` are the sizes that the shapes were made from, by the names that profiles use. `repeats` says that the
    same call will likely come again, so that capturing it pays.
    """

    dims: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    addresses: Mapping[str, int]
    repeats: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls that are the same launch."""
        return (*self.dims.values(), *self.addresses.values())


class Engine(Protocol):
    """One compiled graph over a device's memory. It keeps no state between calls."""

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
        """The sizes that it was built for."""
        ...

    def prepare(self) -> None:
        """Takes the memory that calls need; after every engine of a bundle has been opened."""
        ...

    def launch(self, call: Call) -> None:
        """Queues one run. CanvasError when the engine refuses it."""
        ...


@runtime_checkable
class DeviceBackend(Protocol):
    """Opens engines that share one device's memory and queue."""

    rows_apart: bool

    @property
    def device(self) -> Device: ...

    def open_engine(self, name: str, file: Path, profiles: Any) -> Engine:
        """Loads the engine in `file`, built with the manifest's `profiles` (none: every size works).
        CanvasError when it cannot be loaded."""
        ...
