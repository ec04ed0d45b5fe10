"""Base class of graph weights that are replaced by their quantized form, and the forms of the embedding table: either
the table itself is quantized, or only its two products."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from canvasrt.checkpoints.weight_names import PROJECTION
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


class EmbeddingTable(Quantized):
    """The embedding table: one product uses it, another uses its transpose, and rows are looked up."""

    def rewrite(self) -> None:
        """Let the products use the dequantized table, and dequantize looked-up rows separately.

        Before the lookup, rows are dequantized by a scale of 1; after it, they are scaled. So TensorRT looks up rows of
        codes. If rows were scaled before the lookup, TensorRT would write the whole dequantized table to memory.
        """
        first = self.graph[0]
        values = self._values()
        scale = self._initializer(SCALE, self.dtype, self.form.scale_shape)
        wide = self._insert(first, "DequantizeLinear", [values, scale], "wide", axis=0)
        one = ir.tensor(np.ones((), np.float32).astype(self.dtype.numpy()), name=f"{self.name}/one")
        unit = self._insert(first, "Constant", [], "unit", value=one)
        for node, place in list(self.weight.uses()):
            if node.op_type != "Gather":
                node.replace_input_with(place, wide)
                continue
            token = node.inputs[1]
            assert token is not None
            codes = self._insert(node, "DequantizeLinear", [values, unit], "codes")
            rows = self._insert(node, "Gather", [codes, token], "rows", axis=0)
            scales = self._insert(node, "Gather", [scale, token], "row_scales", axis=0)
            last = self._insert(node, "Constant", [], "last", value=ir.tensor(np.array([-1])))
            factor = self._insert(node, "Unsqueeze", [scales, last], "row_factors")
            result = self._insert(node, "Mul", [rows, factor], "embedded")
            old = node.outputs[0]
            result.type, result.shape = old.type, old.shape
            old.replace_all_uses_with(result)
            self.graph.remove(node, safe=True)
        del self.graph.initializers[self.name]


class Projection(Quantized):
    """The table in its two products: hidden states times the transposed table, and probabilities times the table."""

    def rewrite(self) -> None:
        """Quantize both products, which share one copy of the codes. Lookups still read the unquantized table."""
        self.name = PROJECTION
        scale = self._initializer(SCALE, FLOAT32, ())
        wide = self._wide(self.graph[0], self._values(), scale, "wide")
        for node, place in list(self.weight.uses()):
            if node.op_type == "Gather":
                continue
            node.replace_input_with(place, wide)
            if node.op_type == "Transpose":
                (product,) = node.outputs[0].consumers()
                self._round(product, INPUT_SCALE)
            else:
                # The largest unnormalised probability is 1, so the scale is known.
                self._round(node, SOFT_SCALE)

    def _round(self, product: ir.Node, suffix: str) -> None:
        x = product.inputs[0]
        assert x is not None
        scale = self._initializer(suffix, FLOAT32, ())
        dtype = int(dtype_of(self.format.codes))
        bits = self._insert(
            product, "QuantizeLinear", [x, scale], f"{suffix}d_bits", output_dtype=dtype
        )
        product.replace_input_with(0, self._wide(product, bits, scale, f"{suffix}d"))

    def _wide(self, before: ir.Node, codes: ir.Value, scale: ir.Value, name: str) -> ir.Value:
        wide = int(self.dtype)
        return self._insert(before, "DequantizeLinear", [codes, scale], name, output_dtype=wide)


def dtype_of(codes: Codes) -> ir.DataType:
    return ir.DataType[codes.onnx]


def add_initializer(
    graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...]
) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    graph.initializers[name] = value
    return value
