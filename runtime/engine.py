"""What the runtime asks of a backend: segments that map named arrays to named arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

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

    # True when one request's results may change in the last bits with what shares its batch:
    # such a backend runs a request a pass, so that its tokens cannot change.
    rows_apart: bool
    # How many passes may run at the same time.
    max_workers: int

    def open(self, name: str, file: Path) -> Segment:
        """Loads the graph or engine in `file`. CanvasError when it cannot be loaded."""
        ...
