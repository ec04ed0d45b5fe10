"""A quantized weight: its form in a graph, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from canvasrt.errors import CanvasError
from canvasrt.formats import FORMATS
from canvasrt.graphs.lowbits import Bytes, Floats


@dataclass(frozen=True)
class Form:
    """A quantized weight's format and shapes, named as in `Packed`. `block` is the number of codes per block."""

    format: str
    shape: tuple[int, ...]
    scale_shape: tuple[int, ...] = ()
    factor_shape: tuple[int, ...] | None = None
    block: int | None = None


@dataclass(frozen=True)
class Packed:
    """One quantized weight, `[out, in]` or `[E, out, in]`. It equals `values × block_scales × scale × factor`.

    Attributes:
        format: a name in the table of number formats.
        values: uint8 `[…, out, in]`, one code per byte; or `[…, out, in / 2]`, two 4-bit codes per byte, the first in
        the low bits.
        scale: float32; a scalar, or `[out]` for the INT8 table and 2-D FP8 weights that are scaled per output; None for
            INT4.
        input_scale: float32 scalar, the input's scale; None if inputs are not quantized.
        block_scales: NVFP4's E4M3 codes `[…, out, in / 16]`; or INT4's scales `[…, out, in / block]`, as float32
            numbers that are exact in bfloat16.
        factor: float32 by which the product is multiplied: `[E, 1, 1]` or `[E, 1, out]`; `[out]` for a 2-D weight.
    """

    format: str
    values: Bytes
    scale: Floats | None
    input_scale: Floats | None
    block_scales: npt.NDArray[Any] | None = None
    factor: Floats | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "input_scale", "factor"):
            found = getattr(self, name)
            if found is not None and not (np.isfinite(found) & (found > 0)).all():
                raise CanvasError(
                    f"a weight's {name} contains numbers that are not positive and finite",
                    "calibrate again, or use a checkpoint whose scales are positive and finite",
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape, `[out, in]` or `[E, out, in]`."""
        *rows, last = self.values.shape
        return (*rows, last * 8 // FORMATS[self.format].bits)

    @property
    def form(self) -> Form:
        """The weight's form in the graph."""
        factor = None if self.factor is None else self.factor.shape
        scale = () if self.scale is None else self.scale.shape
        blocks = self.block_scales
        block = None if blocks is None else self.shape[-1] // blocks.shape[-1]
        return Form(self.format, self.shape, scale, factor, block)
