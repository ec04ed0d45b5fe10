"""Weights that a checkpoint already stores quantized: codes and block scales are copied to the graph unchanged.

A checkpoint scales every matrix separately, but a graph stacks several matrices, and all experts, into one weight. So
the matrices' scales become one scalar, plus factors by which the product is multiplied. The largest input scale
replaces all of them, because the input is quantized only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canvasrt.errors import CanvasError
from canvasrt.export.weights import DAMAGED, Weight, check_scales
from canvasrt.formats import FORMATS, NumberFormat
from canvasrt.graphs.lowbits import Bytes, Floats, dequantize
from canvasrt.graphs.packed import Form, Packed

# A quantized weight's format, by its dtype in the file.
_BY_DTYPE = {torch.uint8: FORMATS["nvfp4"], torch.float8_e4m3fn: FORMATS["fp8"]}
_NAN = 0x7F  # E4M3's code of NaN, without its sign


@dataclass(frozen=True)
class StoredCodes:
    """A graph's weight that the checkpoint stores in FP8 or NVFP4. `input_scale` is None if the checkpoint does not
    store it."""

    weight: Weight
    form: Form
    scale: Floats
    factor: Floats | None
    input_scale: Floats | None

    @property
    def is_complete(self) -> bool:
        """Whether the checkpoint stores the input's scale, too."""
        return self.input_scale is not None

    def pack(self, input_scale: float | None = None) -> Packed:
        """Read codes and block scales. If `input_scale` is set, it replaces the checkpoint's input scale."""
        found = self.input_scale if input_scale is None else np.array(input_scale, np.float32)
        if found is None:
            raise CanvasError(
                f"{_module(self.weight.parts[0])} has no input_scale in {self.weight.checkpoint.path}",
                "give calibration prompts: canvasrt export CHECKPOINT --calibration FILE",
            )
        *rows, width = self.form.shape
        format = FORMATS[self.form.format]
        values = self._stack("weight", (*rows, width * format.bits // 8))
        block = format.block(width)
        blocks = self._stack("weight_scale", (*rows, width // block)) if block else None
        return Packed(self.form.format, values, self.scale, found, blocks, self.factor)

    def wide(self) -> Iterator[Tensor]:
        """Yield the weight's values in float32, part by part, in the order of `Weight.read`."""
        rows = self.scale * (1 if self.factor is None else self.factor)
        *experts, out, _ = self.form.shape
        shape = (experts[0] if experts else 1, out)
        scales = np.broadcast_to(rows.reshape(-1, rows.shape[-1] if rows.ndim else 1), shape)
        first = 0
        for part in self.weight.parts:
            codes = self._codes(part, "weight")
            scale = scales.reshape(-1, 1)[first : first + len(codes)]
            first += len(codes)
            blocks = self._codes(part, "weight_scale") if self.form.block else None
            yield torch.from_numpy(dequantize(self.form.format, codes, 1, blocks) * scale)

    def _stack(self, kind: str, shape: tuple[int, ...]) -> Bytes:
        """Read the tensor `kind` of every part, and stack these tensors along the output axis."""
        out = np.empty(shape, np.uint8)
        flat = out.reshape(-1, shape[-1])
        first = 0
        for part in self.weight.parts:
            codes = self._codes(part, kind)
            flat[first : first + len(codes)] = codes
            first += len(codes)
        return out

    def _codes(self, part: str, kind: str) -> Bytes:
        """Return one tensor's bytes. Raises CanvasError if the bytes encode invalid numbers."""
        name = f"{_module(part)}.{kind}"
        codes = self.weight.checkpoint.read(name).view(torch.uint8).numpy()
        if kind == "weight_scale":
            # In E4M3, 0x00 is zero, 0x7F is NaN, and higher codes are negative numbers.
            wrong = (codes == 0) | (codes >= _NAN)
            what = "block scales that are zero, negative or not finite"
        else:
            bytes_apart = FORMATS[self.form.format].bits == 8
            wrong = (codes & _NAN == _NAN) if bytes_apart else np.zeros(0, bool)
            what = "numbers that are not finite"
        if wrong.any():
            raise CanvasError(
                f"{name} in {self.weight.checkpoint.path} has {int(wrong.sum())} {what}", DAMAGED
            )
        return codes


def read_codes(weight: Weight) -> StoredCodes | None:
    """Return the codes that the checkpoint stores for a graph's weight; None if the weight is not quantized there.

    Raises `CanvasError`, naming the tensor, for scales that are missing, not positive or not finite, for shapes that
    disagree with the configuration, and for a weight whose parts have different formats. `pack` and `wide` check the
    values of codes and block scales.
    """
    held = weight.checkpoint
    formats = {part: _BY_DTYPE.get(held.dtype(part)) for part in weight.parts if part in held}
    kinds = set(formats.values())
    if not formats or kinds == {None}:
        return None
    if len(kinds) > 1:
        first, *others = formats
        other = next(part for part in others if formats[part] != formats[first])
        raise CanvasError(
            f"{first} is {_said(formats[first])} and {other} is {_said(formats[other])},"
            " but the graph stacks them into one weight",
            "quantize the bf16 checkpoint with canvasrt instead",
        )
    (format,) = kinds
    assert format is not None
    return _read(weight, format)


def _said(format: NumberFormat | None) -> str:
    return format.name if format else "not quantized"


def _read(weight: Weight, format: NumberFormat) -> StoredCodes:
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    each = [_PartScales(weight, part, format) for part in weight.parts]
    rows = sum(part.rows for part in each)
    wanted = weight.shape[0] if len(weight.shape) == 2 else weight.shape[0] * weight.shape[1]
    if rows != wanted:
        weight.refuse(" + ".join(weight.parts), f"{rows} rows", f"{wanted} rows")
    by_row = [np.broadcast_to(part.scales, part.rows) for part in each]
    scales = np.concatenate(by_row).reshape(experts, -1)
    scale, factor = _split(scales, format, batched=len(weight.shape) == 3)
    inputs = [part.input_scale for part in each]
    missing = [part.module for part in each if part.input_scale is None]
    if missing and len(missing) != len(inputs):
        raise CanvasError(
            f"{weight.checkpoint.path} has no tensor {missing[0]}.input_scale, although other weights have one",
            DAMAGED,
        )
    shape = None if factor is None else factor.shape
    form = Form(format.name, weight.shape, scale.shape, shape, format.block(weight.shape[-1]))
    found = None if missing else np.array(max(value for value in inputs if value is not None))
    return StoredCodes(weight, form, scale, factor, found)


def _split(scales: Floats, format: NumberFormat, batched: bool) -> tuple[Floats, Floats | None]:
    """Split the rows' scales `[E, out]` into the weight's scale and, if needed, factors by which the product is
    multiplied."""
    if (scales == scales[0, 0]).all():
        return np.array(scales[0, 0]), None
    if not format.blocks and not batched:
        return scales[0], None
    # The scale is a power of two, so that no bits of the checkpoint's scales are lost.
    scale = np.exp2(np.floor(np.log2(scales.max()))).astype(np.float32)
    factor = scales / scale
    if batched:
        by_expert = (factor == factor[:, :1]).all()
        factor = (factor[:, :1] if by_expert else factor)[:, None, :]
    else:
        factor = factor[0]
    return np.array(scale), factor


class _PartScales:
    """Reads and checks the scales of one part of a weight."""

    def __init__(self, weight: Weight, part: str, format: NumberFormat) -> None:
        self._weight, self.module = weight, _module(part)
        shape = weight.checkpoint.shape(part)
        width = weight.shape[-1]
        packed = width * format.bits // 8
        if len(shape) != 2 or shape[1] != packed:
            weight.refuse(part, f"shape {shape}", f"{packed} columns of {format.name}")
        self.rows = shape[0]
        if not format.divides(width):
            weight.refuse(part, f"{format.name} in {format.blocks_text}", f"rows of {width}")
        block = format.block(width)
        if block:
            self._check_blocks(f"{self.module}.weight_scale", (self.rows, width // block))
            self.scales = self._numbers("weight_scale_2", ((), (1,)))
        else:
            rows = self.rows
            self.scales = self._numbers("weight_scale", ((), (1,), (rows,), (rows, 1)))
        found = f"{self.module}.input_scale" in weight.checkpoint
        self.input_scale = self._numbers("input_scale", ((), (1,)))[0] if found else None

    def _numbers(self, kind: str, shapes: tuple[tuple[int, ...], ...]) -> Floats:
        name = f"{self.module}.{kind}"
        self._require(name)
        tensor = self._weight.checkpoint.read(name)
        if tuple(tensor.shape) not in shapes:
            self._weight.refuse(name, f"shape {tuple(tensor.shape)}", f"{shapes[-1]}")
        values = tensor.to(torch.float32).reshape(-1).numpy()
        check_scales(values, name, self._weight.checkpoint.path)
        return values

    def _check_blocks(self, name: str, shape: tuple[int, int]) -> None:
        self._require(name)
        held = self._weight.checkpoint
        if held.dtype(name) != torch.float8_e4m3fn or held.shape(name) != shape:
            found = f"{held.dtype(name)} {held.shape(name)}".removeprefix("torch.")
            wanted = f"float8_e4m3fn {shape} for a weight of {self.rows} rows"
            self._weight.refuse(name, found, wanted)

    def _require(self, name: str) -> None:
        if name not in self._weight.checkpoint:
            raise CanvasError(
                f"{self._weight.checkpoint.path} has no tensor {name}, the scale of a quantized weight",
                DAMAGED,
            )


def _module(part: str) -> str:
    return part.removesuffix(".weight")
