"""Takes the kernel list of an engine from the messages of its builder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from canvasrt.kernels import store
from canvasrt.kernels.parse import is_kernel_list, parse
from canvasrt.kernels.resolve import resolve
from canvasrt.kernels.shapes import shapes_of


class Capture:
    """Sees every message of a builder, and keeps the one that lists the kernels."""

    def __init__(self) -> None:
        self.message: str | None = None

    def see(self, message: str) -> None:
        """Call it with each message, of any severity."""
        if is_kernel_list(message):
            self.message = message

    def write(
        self, trt: Any, network: Any, fixed: Mapping[str, Mapping[str, int]], file: Path
    ) -> bool:
        """Write the kernels that were seen to `file`; False when the builder listed none.

        `network` is a parsed one, of which nothing will be built any more; `fixed` by profile, in the engine's order,
        the dimensions that have one size alone.
        """
        if self.message is None:
            return False
        shapes = shapes_of(trt, network, list(fixed.values()))
        programs = parse(self.message)
        store.write(
            {
                name: resolve(kernels, each, sizes)
                for (name, sizes), each, kernels in zip(
                    fixed.items(), shapes, programs, strict=True
                )
            },
            file,
        )
        return True
