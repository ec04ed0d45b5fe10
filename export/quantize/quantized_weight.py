"""Base class of graph weights that are replaced by their quantized form, and the names of that form's parts."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from canvasrt.errors import CanvasError
from canvasrt.export.quantize.packed import Form
from canvasrt.formats import FORMATS, Codes

FLOAT8, FLOAT32, BFLOAT16 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT, ir.DataType.BFLOAT16
# Suffixes in the names of a weight's parts.
VALUES, BLOCK_SCALES, SCALE = "values", "block_scales", "scale"
FACTOR, INPUT_SCALE, SOFT_SCALE = "factor", "input_scale", "soft_scale"


class Quantized:
    """A graph's weight, which is replaced by its quantized form."""

    def __init__(self, graph: ir.Graph, name: str, form: Form) -> None:
        self.graph, self.name, self.form = graph, name, form
        weight = graph.initializers.get(name)
        if weight is None:
            raise CanvasError(f"the graph has no weight {name}", "quantize a graph that has it")
        if weight.shape != form.shape:
            raise CanvasError(
                f"{name} has shape {weight.shape} in the graph, but {form.shape} when quantized",
                "use the calibration and the checkpoint of this graph",
            )
        assert weight.dtype is not None
        self.weight, self.dtype = weight, weight.dtype
        self.format = FORMATS[form.format]

    def _insert(
        self, before: ir.Node, kind: str, inputs: list[ir.Value], name: str, **attributes: Any
    ) -> ir.Value:
        node = ir.node(kind, inputs, attributes, name=f"{self.name}/{name}")
        node.outputs[0].name = f"{self.name}/{name}"
        self.graph.insert_before(before, node)
        return node.outputs[0]

    def _initializer(self, suffix: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        return add_initializer(self.graph, f"{self.name}.{suffix}", dtype, shape)

    def _values(self) -> ir.Value:
        return self._initializer(VALUES, dtype_of(self.format.codes), self.form.shape)


def dtype_of(codes: Codes) -> ir.DataType:
    return ir.DataType[codes.onnx]


def add_initializer(
    graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...]
) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    graph.initializers[name] = value
    return value
