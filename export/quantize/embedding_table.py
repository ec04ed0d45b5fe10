"""The embedding table's quantized forms: either the table itself is quantized, or only its two products."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from canvasrt.checkpoints.weight_names import PROJECTION
from canvasrt.export.quantize.packed import Form
from canvasrt.export.quantize.quantized_weight import (
    FLOAT32,
    INPUT_SCALE,
    SCALE,
    SOFT_SCALE,
    Quantized,
    dtype_of,
)


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

    def __init__(self, graph: ir.Graph, name: str, form: Form) -> None:
        super().__init__(graph, name, form)
        self.name = PROJECTION

    def rewrite(self) -> None:
        """Quantize both products, which share one copy of the codes. Lookups still read the unquantized table."""
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
