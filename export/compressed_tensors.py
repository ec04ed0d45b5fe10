"""INT4 weights that compressed-tensors packed in a checkpoint (llm-compressor's W4A16, including AWQ and GPTQ).

A module's `weight_packed` consists of int32 words. Each word contains eight unsigned codes (signed code + 8), the first
in the lowest bits. XOR with 0x88 turns each byte of a word into two signed codes, as the graph stores them.
`weight_scale` has one scale per group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from canvasrt.checkpoints.quantized import INT4_GROUPS, INT4_HINT
from canvasrt.errors import CanvasError
from canvasrt.export.quantize.quantizers import quantize_weight
from canvasrt.export.weights import DAMAGED, PACKED, Weight, check_scales, packed_name
from canvasrt.formats import FORMATS
from canvasrt.graphs import lowbits
from canvasrt.graphs.lowbits import INT4_OFFSET, Bytes, Floats
from canvasrt.graphs.packed import Form, Packed


@dataclass(frozen=True)
class Int4Codes:
    """A graph's weight that the checkpoint stores in INT4. Activations are not quantized."""

    weight: Weight
    form: Form
    # Complete without an input scale, because activations are not quantized.
    is_complete = True

    def pack(self, input_scale: float | None = None) -> Packed:
        """Read codes and scales."""
        *rows, width = self.form.shape
        block = self.form.block
        assert block is not None
        each = [self._read(part) for part in self.weight.parts]
        values = np.concatenate([codes for codes, _ in each]).reshape(*rows, width // 2)
        scales = np.concatenate([found for _, found in each]).reshape(*rows, width // block)
        return Packed(self.form.format, values, None, None, scales)

    def wide(self) -> Iterator[Tensor]:
        """Yield the weight in float32, part by part, in the order of `Weight.read`. The checkpoint's scales are used
        exactly; only graphs round them to bfloat16."""
        for part in self.weight.parts:
            codes, scales = self._read(part, torch.float32)
            yield torch.from_numpy(lowbits.dequantize("int4", codes, blocks=scales))

    def _read(self, part: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Bytes, Floats]:
        """Return the codes `[out, in / 2]` and scales `[out, in / block]` of one part. Scales are rounded to `dtype`,
        by default to bfloat16, the scales' dtype in graphs."""
        checkpoint, width = self.weight.checkpoint, self.form.shape[-1]
        words = checkpoint.read(packed_name(part)).contiguous()
        codes = words.view(torch.uint8).numpy().reshape(len(words), width // 2) ^ INT4_OFFSET
        scales = _scales(self.weight, part, dtype)
        # If a scale covers several blocks, repeat it for each.
        return codes, np.repeat(scales, width // (self.form.block or width) // scales.shape[1], 1)


@dataclass(frozen=True)
class TableCodes:
    """The embedding table of a checkpoint that does not quantize it, for graphs that do."""

    weight: Weight
    form: Form
    is_complete = True

    def pack(self, input_scale: float | None = None) -> Packed:
        """Quantize the table piece by piece, so that only one piece is in float32 at a time."""
        parts = (part.numpy() for part in self.weight.read(torch.float32))
        return quantize_weight(parts, self.form.format, None, name=self.weight.name)

    def wide(self) -> Iterator[Tensor]:
        """Yield the table in float32, piece by piece."""
        return self.weight.read(torch.float32)


def read_int4(weight: Weight) -> Int4Codes | None:
    """Return a weight's INT4 form, or None if the checkpoint does not store it in INT4.

    Raises `CanvasError`, naming the tensor, for missing scales, unsupported group lengths, shapes that disagree with
    the configuration, and weights of which only some parts are INT4. `pack` and `wide` check that scales are positive
    and finite. `quantization_of` has already refused zero points and reordered inputs.
    """
    held = weight.checkpoint
    packed = [part for part in weight.parts if packed_name(part) in held]
    if not packed:
        return None
    if len(packed) != len(weight.parts):
        other = next(part for part in weight.parts if part not in packed)
        raise CanvasError(
            f"{packed[0]} is int4 and {other} is not, but the graph stacks them into one weight",
            "quantize the bf16 checkpoint with canvasrt instead",
        )
    rows = [_rows(weight, part) for part in packed]
    wanted = weight.shape[0] if len(weight.shape) == 2 else weight.shape[0] * weight.shape[1]
    if sum(rows) != wanted:
        weight.refuse(" + ".join(packed), f"{sum(rows)} rows", f"{wanted} rows")
    blocks = {_block(weight, part) for part in packed}
    return Int4Codes(weight, Form("int4", weight.shape, block=min(blocks)))


def _rows(weight: Weight, part: str) -> int:
    """Check one part's dtype and shape. Return its number of outputs."""
    name, width = packed_name(part), weight.shape[-1]
    held = weight.checkpoint
    shape = held.shape(name)
    if len(shape) != 2 or held.dtype(name) != torch.int32 or shape[1] * 8 != width:
        said = f"{str(held.dtype(name)).removeprefix('torch.')} {shape}"
        weight.refuse(name, said, f"int32 words for {width} inputs")
    return shape[0]


def _block(weight: Weight, part: str) -> int:
    """Return the graph's block length, which is the number of inputs that share a scale. It equals the checkpoint's
    group length, but is shorter if the checkpoint's rows have fewer than `least_blocks` groups."""
    name, width = _scale_name(part), weight.shape[-1]
    held = weight.checkpoint
    if name not in held:
        raise CanvasError(f"{held.path} has no tensor {name}, the scale of an INT4 weight", DAMAGED)
    shape = held.shape(name)
    if len(shape) != 2 or not shape[1] or width % shape[1]:
        weight.refuse(name, f"shape {shape}", f"scales for rows of {width}")
    group = width // shape[1]
    short = FORMATS["int4"].block(width)
    if shape[1] < FORMATS["int4"].least_blocks and short:
        return short
    if group not in INT4_GROUPS:
        sizes = ", ".join(map(str, INT4_GROUPS[:-1])) + f" or {INT4_GROUPS[-1]}"
        raise CanvasError(
            f"{name} in {held.path} has groups of {group} inputs, not of {sizes}",
            INT4_HINT,
        )
    return group


def _scales(weight: Weight, part: str, dtype: torch.dtype) -> Floats:
    """Return a part's scales as float32, rounded to `dtype`."""
    name = _scale_name(part)
    values = weight.checkpoint.read(name).to(dtype).to(torch.float32).numpy()
    check_scales(values, name, weight.checkpoint.path)
    return values


def _scale_name(part: str) -> str:
    return packed_name(part).removesuffix(PACKED) + "weight_scale"
