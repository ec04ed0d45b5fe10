"""Captures an engine's kernel list from its builder's messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from canvasrt.roofline import store
from canvasrt.roofline.parse import is_kernel_list, parse
from canvasrt.roofline.resolve import resolve_sizes
from canvasrt.roofline.tensor_shapes import shapes_of


class Capture:
    """Receives a builder's messages and stores the kernel list."""

    def __init__(self) -> None:
        self.message: str | None = None

    def see(self, message: str) -> None:
        """Receive one message of any severity."""
        if is_kernel_list(message):
            self.message = message

    def write(
        self, trt: Any, network: Any, fixed: Mapping[str, Mapping[str, int]], file: Path
    ) -> bool:
        """Write the kernel list to `file`; return False if the builder printed none.

        `network` is the parsed network; it cannot be built afterwards. `fixed` maps each profile, in the engine's
        order, to the sizes of the dimensions that have a single size in that profile.
        """
        if self.message is None:
            return False
        shapes = shapes_of(trt, network, list(fixed.values()))
        programs = parse(self.message)
        store.write_kernels(
            {
                name: resolve_sizes(kernels, each, sizes)
                for (name, sizes), each, kernels in zip(
                    fixed.items(), shapes, programs, strict=True
                )
            },
            file,
        )
        return True
