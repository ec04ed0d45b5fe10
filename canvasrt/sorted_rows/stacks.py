"""Extracts the experts' weights from a body graph: plain numbers, or codes and scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

from canvasrt.checkpoints.weight_names import DOWN, GATE_UP
from canvasrt.graphs import external
from canvasrt.graphs.edit import graph_input, sizes_of
from canvasrt.graphs.lowbits import Bytes, Floats
from canvasrt.sorted_rows.description import (
    DOWN_KERNEL,
    GATE_UP_KERNEL,
    ROUND,
    ROUNDED,
    ExpertSizes,
    ExpertStack,
    KernelForm,
    SortedLayer,
    inputs_per_step,
    layer_kernels,
)


class GraphExperts:
    """The experts of a body graph's layers."""

    def __init__(self, model: ir.Model, sizes: ExpertSizes, formats: Mapping[str, str]) -> None:
        """`formats` maps the names of the graph's quantized weights to their formats."""
        self._graph, self._sizes, self._formats = model.graph, sizes, formats
        dtype = graph_input(model.graph, "hidden").dtype
        assert dtype is not None
        self.dtype = str(dtype.numpy().name)
        self._count = sum(str(v.name).startswith("new_key_") for v in model.graph.outputs)
        self.forms = [self._layer_forms(number) for number in range(self._count)]

    def write(self, file: BinaryIO) -> list[SortedLayer]:
        """Write all weights to `file`. Return the layers' descriptions, which locate the weights."""
        layers = []
        for number, (first, second) in enumerate(self.forms):
            gate_up = self._write(f"layers.{number}.{GATE_UP}", first, file)
            down = self._write(f"layers.{number}.{DOWN}", second, file)
            rounding = next(
                (f.name for f in layer_kernels(first, second) if f.function == ROUND), None
            )
            scales = (self._input_scale(number, form) for form in (first, second))
            layers.append(SortedLayer(gate_up, down, rounding, *scales))
        return layers

    def _input_scale(self, number: int, form: KernelForm) -> float:
        if form.format not in ROUNDED:
            return 1.0
        name = DOWN if form.function == DOWN_KERNEL else GATE_UP
        return float(self._numbers(f"layers.{number}.{name}.input_scale"))

    def _layer_forms(self, number: int) -> tuple[KernelForm, KernelForm]:
        first, second = (f"layers.{number}.{each}" for each in (GATE_UP, DOWN))
        one, other = self._formats.get(first), self._formats.get(second)
        following = other if other in ROUNDED else None
        about = (self._sizes, self.dtype)
        forms = (
            KernelForm(GATE_UP_KERNEL, *about, one, following, self._block(first, one)),
            KernelForm(DOWN_KERNEL, *about, other, None, self._block(second, other)),
        )
        for form in forms:
            inputs_per_step(form)  # raises CanvasError for a form that no kernel multiplies
        return forms

    def _block(self, name: str, format: str | None) -> int | None:
        if format != "int4":
            return None
        width = self._sizes.inner if name.endswith(DOWN) else self._sizes.size
        return width // sizes_of(self._graph.initializers[f"{name}.block_scales"])[-1]

    def _write(self, name: str, form: KernelForm, file: BinaryIO) -> ExpertStack:
        if form.format is None:
            return ExpertStack(form.name, _append(file, self._pieces(name)))
        if form.format == "int4":
            codes = self._pieces(f"{name}.values")
            values = _append(
                file, (in_steps(each, form.width, inputs_per_step(form)) for each in codes)
            )
            blocks = _append(file, self._pieces(f"{name}.block_scales"))
            return ExpertStack(form.name, values, blocks)
        values, blocks = _append(file, self._pieces(f"{name}.values")), (0, 0)
        if form.format == "nvfp4":
            blocks = _append(file, self._pieces(f"{name}.block_scales"))
        scales = _append(file, [self._output_scales(name, form)])
        return ExpertStack(form.name, values, blocks, scales)

    def _output_scales(self, name: str, form: KernelForm) -> Floats:
        """Return the factors `[E, out]` for the outputs of FP8 or NVFP4 products: the scales of weights and inputs,
        multiplied."""
        rows = 2 * form.outputs if form.function == GATE_UP_KERNEL else form.outputs
        scale = self._numbers(f"{name}.scale") * self._numbers(f"{name}.input_scale")
        factors = np.ones((1, 1), np.float32)
        if f"{name}.factor" in self._graph.initializers:
            factors = self._numbers(f"{name}.factor")[:, 0]
        return np.ascontiguousarray(np.broadcast_to(scale * factors, (self._sizes.experts, rows)))

    def _numbers(self, name: str) -> Floats:
        tensor = self._graph.initializers[name].const_value
        assert tensor is not None
        return external.array(tensor).astype(np.float32)

    def _pieces(self, name: str) -> Iterator[Bytes]:
        """Yield a stack's bytes, one expert at a time."""
        tensor = self._graph.initializers[name].const_value
        assert isinstance(tensor, ir.ExternalTensor), name
        stored = external.mapped(tensor)
        yield from stored.reshape(self._sizes.experts, -1)


def in_steps(codes: Bytes, width: int, step: int) -> Bytes:
    """Repack rows of `width` INT4 codes, so that a byte has one code from each half of a step, not two neighbours.

    A step is the `step` inputs that the kernel multiplies at a time. The low bits of bytes hold the codes of a step's
    first half, and the high bits the codes of its second half.
    """
    pairs = codes.reshape(-1, width // 2)
    each = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(-1, width // step, 2, step // 2)
    return (each[:, :, 0] | each[:, :, 1] << 4).reshape(-1)


def _append(file: BinaryIO, pieces: Iterator[Bytes] | list[Floats]) -> tuple[int, int]:
    """Append arrays to a file. Return the offset of the first byte, and the number of bytes."""
    file.write(b"\0" * (-file.tell() % external.PAGE_BYTES))
    begin = file.tell()
    for piece in pieces:
        file.write(np.ascontiguousarray(piece).data)
    return begin, file.tell() - begin
