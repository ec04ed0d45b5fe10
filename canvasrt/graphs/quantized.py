"""Rewrites weights in an exported graph to quantized forms that TensorRT multiplies without dequantizing them in
memory.

Each `weight → Transpose → MatMul` becomes the following. T is the graph's dtype; scales are float32 unless noted.

- Without blocks (FP8), the input passes through `QuantizeLinear → DequantizeLinear(T)`, and the weight through
  `DequantizeLinear(T) → Transpose` with one scale. If every output has its own scale, the scales multiply the product
  in float32 instead.
- In blocks with scales in T (INT4), the weight passes through `DequantizeLinear → Transpose`. The input is unchanged.
- In blocks with quantized scales (NVFP4), the input passes through `TRT_FP4DynamicQuantize → DequantizeLinear →
  Cast(T)`, and the weight through `DequantizeLinear → Cast(T) → Transpose`. Its block scales are dequantized first, by
  the global scale.

Then comes the MatMul. If there are factors, they multiply its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from canvasrt.checkpoints.weight_names import PROJECTION, TABLE
from canvasrt.errors import CanvasError
from canvasrt.formats import FORMATS, Codes
from canvasrt.graphs import external, lowbits
from canvasrt.graphs.edit import (
    all_outputs,
    graph_input,
    initializer,
    input_of,
    insert,
    integers_of,
    made_by,
)
from canvasrt.graphs.external import Stored
from canvasrt.graphs.names import BLOCK_SCALES, FACTOR, INPUT_SCALE, SCALE, SOFT_SCALE, VALUES
from canvasrt.graphs.packed import Form, Packed

KEY_SCALE, VALUE_SCALE = "attention.key_scale", "attention.value_scale"
_FLOAT8, _FLOAT32, _BFLOAT16 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT, ir.DataType.BFLOAT16
# The first IR version that has 4-bit numbers.
_IR_VERSION = 11
_TENSORRT = "trt"


def quantize_graph(model: ir.Model, forms: Mapping[str, Form]) -> None:
    """Replace weights of `model` by quantized ones, in place. `forms`: initializer name → form.

    A weight `w` is replaced by initializers without data: `w.values` and, if its form has them, `w.scale`,
    `w.input_scale`, `w.block_scales` and `w.factor`. `stored_parts` yields the data. If weights of one format share an
    input, that input is quantized once, with the first weight's `input_scale`. If only the table's products are
    quantized, they use a quantized copy named `projection`, and the table is kept for lookups.

    Raises `CanvasError` for a name that is not the weight of exactly one matrix product, and for a wrong shape.
    """
    inputs: dict[tuple[str, str], ir.Value] = {}
    for name, form in forms.items():
        if FORMATS[form.format].of_table:
            _Table(model.graph, name, form).rewrite()
        elif name == TABLE:
            _Projection(model.graph, name, form).rewrite()
        else:
            _Product(model.graph, name, form).rewrite(inputs)
    model.opset_imports.setdefault(_TENSORRT, 1)
    model.ir_version = max(model.ir_version, _IR_VERSION)


def quantize_cache(model: ir.Model) -> list[str]:
    """Rewrite a body graph in place so that keys and values are E4M3 in its inputs and outputs. Return the scales'
    names.

    For layer k of this graph, `layers.<k>.attention.key_scale` and `value_scale` are new initializers without data. In
    attention, a call's own keys and values are not rounded.
    """
    graph = model.graph
    layers = [
        str(v.name).removeprefix("past_key_") for v in graph.inputs if "past_key_" in str(v.name)
    ]
    scales = []
    for place, layer in enumerate(layers):
        for part, suffix in (("key", KEY_SCALE), ("value", VALUE_SCALE)):
            scale = initializer(graph, f"layers.{place}.{suffix}", _FLOAT32, ())
            scales.append(str(scale.name))
            _read_cache(graph, f"past_{part}_{layer}", scale)
            _write_cache(graph, f"new_{part}_{layer}", scale)
    return scales


def stored_parts(model: ir.Model, name: str, packed: Packed) -> Iterator[Stored]:
    """Yield the parts of the quantized weight `name` that the rewritten graph contains. They become external data."""
    format = FORMATS[packed.format]
    block_scales = _dtype_of(format.block_scales) if format.block_scales else _FLOAT32
    name = PROJECTION if name == TABLE and format.projects else name
    soft_scale = np.array(format.scale(1.0), np.float32)
    parts: list[tuple[str, ir.DataType, tuple[int, ...], np.ndarray | None]] = [
        (VALUES, _dtype_of(format.codes), packed.shape, packed.values),
        (BLOCK_SCALES, block_scales, (), packed.block_scales),
        (SCALE, _FLOAT32, (), packed.scale),
        (INPUT_SCALE, _FLOAT32, (), packed.input_scale),
        (FACTOR, _FLOAT32, (), packed.factor),
        (SOFT_SCALE, _FLOAT32, (), soft_scale),
    ]
    for suffix, dtype, shape, data in parts:
        found = model.graph.initializers.get(f"{name}.{suffix}")
        if found is None or data is None:
            continue
        if data.dtype == np.float32 and found.dtype == _BFLOAT16:
            dtype, data = _BFLOAT16, lowbits.to_bf16(data)
        yield external.stored(f"{name}.{suffix}", dtype, shape or data.shape, data)


class _Quantized:
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
        self, before: ir.Node, kind: str, inputs: list[ir.Value], *names: str, **attributes: Any
    ) -> ir.Value:
        full = [f"{self.name}/{name}" for name in names]
        return insert(before, kind, inputs, *full, suffix="", **attributes)

    def _constant(self, before: ir.Node, data: Any, name: str) -> ir.Value:
        return self._insert(before, "Constant", [], name, value=ir.tensor(data))

    def _initializer(self, suffix: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        return initializer(self.graph, f"{self.name}.{suffix}", dtype, shape)

    def _values(self) -> ir.Value:
        return self._initializer(VALUES, _dtype_of(self.format.codes), self.form.shape)

    def _narrow(self, before: ir.Node, x: ir.Value, scale: ir.Value, name: str) -> ir.Value:
        dtype = int(_dtype_of(self.format.codes))
        return self._insert(before, "QuantizeLinear", [x, scale], name, output_dtype=dtype)

    def _wide(self, before: ir.Node, codes: ir.Value, scale: ir.Value, name: str) -> ir.Value:
        wide = int(self.dtype)
        return self._insert(before, "DequantizeLinear", [codes, scale], name, output_dtype=wide)


class _Table(_Quantized):
    """The embedding table: one product uses it, another uses its transpose, and rows are looked up."""

    def rewrite(self) -> None:
        """Let the products use the dequantized table, and dequantize looked-up rows separately.

        Rows are dequantized with a scale of 1 before the lookup, and scaled after it. So TensorRT looks up rows of
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
            token = input_of(node, 1)
            codes = self._insert(node, "DequantizeLinear", [values, unit], "codes")
            rows = self._insert(node, "Gather", [codes, token], "rows", axis=0)
            scales = self._insert(node, "Gather", [scale, token], "row_scales", axis=0)
            last = self._constant(node, np.array([-1]), "last")
            factor = self._insert(node, "Unsqueeze", [scales, last], "row_factors")
            result = self._insert(node, "Mul", [rows, factor], "embedded")
            old = node.outputs[0]
            result.type, result.shape = old.type, old.shape
            old.replace_all_uses_with(result)
            self.graph.remove(node, safe=True)
        del self.graph.initializers[self.name]


class _Projection(_Quantized):
    """The table in its two products: hidden states times the transposed table, and probabilities times the table."""

    def rewrite(self) -> None:
        """Quantize both products, which share one copy of the codes. Lookups still read the unquantized table."""
        self.name = PROJECTION
        scale = self._initializer(SCALE, _FLOAT32, ())
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
        scale = self._initializer(suffix, _FLOAT32, ())
        bits = self._narrow(product, input_of(product), scale, f"{suffix}d_bits")
        product.replace_input_with(0, self._wide(product, bits, scale, f"{suffix}d"))


class _Product(_Quantized):
    """The matrix product that uses one weight."""

    def __init__(self, graph: ir.Graph, name: str, form: Form) -> None:
        super().__init__(graph, name, form)
        self.node = self._find()

    def rewrite(self, inputs: dict[tuple[str, str], ir.Value]) -> None:
        """Replace the product by its quantized form. `inputs` keeps the quantized inputs, so that products share
        them."""
        x = input_of(self.node)
        rank = len(self.form.shape)
        perm = [*range(rank - 2), rank - 1, rank - 2]
        if self.format.rounds_inputs:
            key = str(x.name), self.form.format
            if key not in inputs:
                inputs[key] = self._input(x)
            x = inputs[key]
        turned = self._add("Transpose", [self._weight()], "turned", perm=perm)
        product = self._add("MatMul", [x, turned], "product")
        if self.form.factor_shape is not None:
            factor = self._initializer(FACTOR, self.dtype, self.form.factor_shape)
            product = self._add("Mul", [product, factor], "scaled")
        old = self.node.outputs[0]
        if self.form.scale_shape:
            product, old = self._scale_outputs(product, old)
        product.type, product.shape = old.type, old.shape
        if old.is_graph_output():
            product.name, old.name = old.name, f"{self.name}/before"
        old.replace_all_uses_with(product, replace_graph_outputs=True)
        if (reshape := old.producer()) is not None and reshape is not self.node:
            self.graph.remove(reshape, safe=True)
        self._remove()

    def _input(self, x: ir.Value) -> ir.Value:
        scale = self._initializer(INPUT_SCALE, _FLOAT32, ())
        if self.format.input_quantizer is None:
            bits = self._narrow(self.node, x, scale, "input_bits")
            return self._wide(self.node, bits, scale, "input")
        block_scales = self.format.block_scales
        assert block_scales is not None
        bits = self._add(
            self.format.input_quantizer,
            [x, scale],
            "input_bits",
            "input_blocks",
            domain=_TENSORRT,
            axis=-1,
            block_size=self.form.block,
            scale_type=int(_dtype_of(block_scales)),
        )
        scales = self._add("DequantizeLinear", [all_outputs(bits)[1], scale], "input_scales")
        return self._widen(bits, scales, "input")

    def _weight(self) -> ir.Value:
        *rows, last = self.form.shape
        values, block_scales = self._values(), self.format.block_scales
        if self.form.block is None:
            if self.form.scale_shape:
                scale = self._constant(self.node, np.float32(1), "one")
            else:
                scale = self._initializer(SCALE, _FLOAT32, ())
            return self._wide(self.node, values, scale, "weight")
        blocks = (*rows, last // self.form.block)
        if block_scales is None:
            # If these scales had another dtype, TensorRT would write the whole dequantized weight to memory.
            scales = self._initializer(BLOCK_SCALES, self.dtype, blocks)
            each = {"axis": -1, "block_size": self.form.block}
            return self._add("DequantizeLinear", [values, scales], "weight", **each)
        codes = self._initializer(BLOCK_SCALES, _dtype_of(block_scales), blocks)
        scale = self._initializer(SCALE, _FLOAT32, ())
        scales = self._add("DequantizeLinear", [codes, scale], "weight_scales")
        return self._widen(values, scales, "weight")

    def _widen(self, bits: ir.Value, scales: ir.Value, name: str) -> ir.Value:
        """Dequantize to float32, the only dtype that TensorRT allows for E2M1, then cast to the graph's dtype, which
        costs nothing."""
        wide = self._add(
            "DequantizeLinear", [bits, scales], f"{name}_wide", axis=-1, block_size=self.form.block
        )
        if self.dtype == _FLOAT32:
            return wide
        return self._add("Cast", [wide], name, to=int(self.dtype))

    def _scale_outputs(self, product: ir.Value, old: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Multiply the product by its scales per output. Return the result, and the value that it replaces.

        If the DequantizeLinear had these scales, TensorRT would write the product in float32. A reshape to heads is
        moved before the multiplication, because TensorRT does not fuse multiplication and norm across a reshape.
        """
        scales = self._initializer(SCALE, _FLOAT32, self.form.scale_shape)
        where, users = self.node, old.consumers()
        size = _last_size(users[0]) if len(users) == 1 else None
        if size is not None:
            where, old = users[0], users[0].outputs[0]
            by_head = self._constant(where, np.array([-1, size]), "by_head")
            scales = self._insert(where, "Reshape", [scales, by_head], "scales")
            heads = [product, input_of(where, 1)]
            product = self._insert(where, "Reshape", heads, "heads", allowzero=1)
        if self.dtype != _FLOAT32:
            product = self._insert(where, "Cast", [product], "wide", to=int(_FLOAT32))
        product = self._insert(where, "Mul", [product, scales], "scaled")
        if self.dtype != _FLOAT32:
            product = self._insert(where, "Cast", [product], "narrow", to=int(self.dtype))
        return product, old

    def _add(self, kind: str, inputs: list[ir.Value], *names: str, **attributes: Any) -> ir.Value:
        return self._insert(self.node, kind, inputs, *names, **attributes)

    def _find(self) -> ir.Node:
        """Return the product: a MatMul over the weight's transpose, or a Gemm that transposes it."""
        users = self.weight.consumers()
        if len(users) == 1 and users[0].op_type == "Transpose":
            users = users[0].outputs[0].consumers()
            if len(users) == 1 and users[0].op_type == "MatMul":
                return users[0]
        elif len(users) == 1 and _is_plain_gemm(users[0]):
            return users[0]
        raise CanvasError(
            f"{self.name} is not the weight of one matrix product, so it cannot be quantized",
            "exclude it in the recipe",
        )

    def _remove(self) -> None:
        transpose = input_of(self.node, 1).producer()
        self.graph.remove(self.node, safe=True)
        if transpose is not None:
            self.graph.remove(transpose, safe=True)
        del self.graph.initializers[self.name]


def _dtype_of(codes: Codes) -> ir.DataType:
    return ir.DataType[codes.onnx]


def _last_size(node: ir.Node) -> int | None:
    """Return the last size of a Reshape's result; None if that size is not constant, or for any other node."""
    shape = made_by(node.inputs[1], "Concat") if node.op_type == "Reshape" else None
    last = integers_of(shape.inputs[-1]) if shape else None
    return last[0] if last else None


def _is_plain_gemm(node: ir.Node) -> bool:
    if node.op_type != "Gemm" or len(node.inputs) != 2:
        return False
    found = {name: attribute.value for name, attribute in node.attributes.items()}
    turned = found.get("transA", 0), found.get("transB", 0)
    return turned == (0, 1) and found.get("alpha", 1) == 1


def _read_cache(graph: ir.Graph, name: str, scale: ir.Value) -> None:
    """Change the graph's input `name` to E4M3. Nodes that read the input now read its dequantized value."""
    value = graph_input(graph, name)
    assert value.dtype is not None
    readers, dtype = list(value.uses()), int(value.dtype)
    both = [value, scale]
    wide = insert(graph[0], "DequantizeLinear", both, f"{name}/wide", suffix="", output_dtype=dtype)
    for reader, place in readers:
        reader.replace_input_with(place, wide)
    value.type = ir.TensorType(_FLOAT8)


def _write_cache(graph: ir.Graph, name: str, scale: ir.Value) -> None:
    """Change the graph's output `name` to E4M3."""
    index, value = next((i, v) for i, v in enumerate(graph.outputs) if v.name == name)
    value.name, dtype = f"{name}/wide", int(_FLOAT8)
    both = [value, scale]
    output = insert(graph, "QuantizeLinear", both, name, suffix="/bits", output_dtype=dtype)
    output.type, output.shape = ir.TensorType(_FLOAT8), value.shape
    graph.outputs[index] = output
