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

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from canvasrt.checkpoints.weight_names import PROJECTION, TABLE
from canvasrt.errors import CanvasError
from canvasrt.export.quantize.packed import Form, Packed
from canvasrt.export.quantize.quantized_weight import (
    BFLOAT16,
    BLOCK_SCALES,
    FACTOR,
    FLOAT8,
    FLOAT32,
    INPUT_SCALE,
    SCALE,
    SOFT_SCALE,
    VALUES,
    EmbeddingTable,
    Projection,
    Quantized,
    add_initializer,
    dtype_of,
)
from canvasrt.export.weights import Weight
from canvasrt.formats import FORMATS
from canvasrt.graphs import external, lowbits
from canvasrt.graphs.external import Stored

KEY_SCALE, VALUE_SCALE = "attention.key_scale", "attention.value_scale"
# The first IR version that has 4-bit numbers.
_IR_VERSION = 11
_TENSORRT = "trt"


def quantize_graph(model: ir.Model, forms: Mapping[str, Form]) -> None:
    """Replace weights of `model` by quantized ones, in place. `forms`: initializer name → form.

    A weight `w` is replaced by initializers without data: those of `w.values`, `w.scale`, `w.input_scale`,
    `w.block_scales` and `w.factor` that its form has. `stored_parts` yields the data. If weights of one format share an
    input, that input is quantized once, with the first weight's `input_scale`. If only the table's products are
    quantized, they use a quantized copy named `projection`, and the table is kept for lookups.

    Raises `CanvasError` for a name that is not the weight of exactly one matrix product, and for a wrong shape.
    """
    inputs: dict[tuple[str, str], ir.Value] = {}
    for name, form in forms.items():
        if FORMATS[form.format].of_table:
            EmbeddingTable(model.graph, name, form).rewrite()
        elif name == TABLE:
            Projection(model.graph, name, form).rewrite()
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
            scale = add_initializer(graph, f"layers.{place}.{suffix}", FLOAT32, ())
            scales.append(str(scale.name))
            _read_cache(graph, f"past_{part}_{layer}", scale)
            _write_cache(graph, f"new_{part}_{layer}", scale)
    return scales


def stored_parts(model: ir.Model, name: str, packed: Packed) -> Iterator[Stored]:
    """Yield the parts of the quantized weight `name` that the rewritten graph contains. They become external data."""
    format = FORMATS[packed.format]
    block_scales = dtype_of(format.block_scales) if format.block_scales else FLOAT32
    name = PROJECTION if name == TABLE and format.projects else name
    soft_scale = np.array(format.scale(1.0), np.float32)
    parts: list[tuple[str, ir.DataType, tuple[int, ...], np.ndarray | None]] = [
        (VALUES, dtype_of(format.codes), packed.shape, packed.values),
        (BLOCK_SCALES, block_scales, (), packed.block_scales),
        (SCALE, FLOAT32, (), packed.scale),
        (INPUT_SCALE, FLOAT32, (), packed.input_scale),
        (FACTOR, FLOAT32, (), packed.factor),
        (SOFT_SCALE, FLOAT32, (), soft_scale),
    ]
    for suffix, dtype, shape, data in parts:
        found = model.graph.initializers.get(f"{name}.{suffix}")
        if found is None or data is None:
            continue
        if data.dtype == np.float32 and found.dtype == BFLOAT16:
            dtype, data = BFLOAT16, lowbits.to_bf16(data)
        yield external.stored(f"{name}.{suffix}", dtype, shape or data.shape, data)


def quantized_items(
    model: ir.Model,
    items: Iterable[Weight | Stored],
    forms: Mapping[str, Form],
    pack: Callable[[Any], Packed],
    cache_scales: Mapping[str, float] | None = None,
) -> Iterator[Weight | Stored]:
    """Rewrite `model` when iteration starts. Yield the weights to write: unquantized ones, the parts of quantized ones,
    and the cache's scales.

    Args:
        forms: the quantized weights' forms by initializer name.
        pack: quantizes an item. It is called for one item at a time, in order.
        cache_scales: an FP8 key-value cache's scales by initializer name; None if the cache has the graph's dtype.
    """
    if forms:
        quantize_graph(model, forms)
    scales = [] if cache_scales is None else quantize_cache(model)
    for item in items:
        if item.name not in forms:
            yield item
            continue
        if (
            item.name in model.graph.initializers
        ):  # the unquantized table, which is kept for lookups
            yield item
        packed = pack(item)
        if packed.form != forms[item.name]:
            raise ValueError(f"{item.name} was quantized to {packed.form}, not as planned")
        yield from stored_parts(model, item.name, packed)
    for name in scales:
        assert cache_scales is not None
        yield external.stored(name, FLOAT32, (), np.array(cache_scales[name], np.float32))


def graph_items(source: Path) -> tuple[ir.Model, list[Stored], dict[str, str]]:
    """Load a graph. Return the graph, its weights in file order, and weight name → file for weights outside the graph's
    own weight file.

    If any initializer is external data, those inside the graph file are constants: they stay there and are not
    returned.
    """
    model = ir.load(source)
    own = source.with_suffix(".bin").name
    stored = sorted(model.graph.initializers.values(), key=_place)
    places = {str(value.name): _place(value)[0] for value in stored}
    apart = {name: place for name, place in places.items() if place and place != own}
    outside = [value for value in stored if places[str(value.name)]]
    return model, [external.from_graph(value) for value in outside or stored], apart


def _place(value: ir.Value) -> tuple[str, int]:
    """Return an initializer's file and its offset there. The file's name is empty if the graph itself stores the
    data."""
    tensor = value.const_value
    return str(getattr(tensor, "location", "")), int(getattr(tensor, "offset", 0) or 0)


class _Product(Quantized):
    """The matrix product that uses one weight."""

    def __init__(self, graph: ir.Graph, name: str, form: Form) -> None:
        super().__init__(graph, name, form)
        self.node = self._find()

    def rewrite(self, inputs: dict[tuple[str, str], ir.Value]) -> None:
        """Replace the product by its quantized form. `inputs` keeps the quantized inputs, so that products share
        them."""
        x = self.node.inputs[0]
        assert x is not None
        rank = len(self.form.shape)
        perm = [*range(rank - 2), rank - 1, rank - 2]
        if self.format.rounds_inputs:
            if (str(x.name), self.form.format) not in inputs:
                inputs[str(x.name), self.form.format] = self._input(x)
            x = inputs[str(x.name), self.form.format]
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
        scale = self._initializer(INPUT_SCALE, FLOAT32, ())
        if self.format.input_quantizer is None:
            dtype = int(dtype_of(self.format.codes))
            bits = self._add("QuantizeLinear", [x, scale], "input_bits", output_dtype=dtype)
            return self._add(
                "DequantizeLinear", [bits, scale], "input", output_dtype=int(self.dtype)
            )
        block_scales = self.format.block_scales
        assert block_scales is not None
        quantize = ir.node(
            self.format.input_quantizer,
            [x, scale],
            {"axis": -1, "block_size": self.form.block, "scale_type": int(dtype_of(block_scales))},
            domain=_TENSORRT,
            num_outputs=2,
            name=f"{self.name}/input_bits",
        )
        bits, blocks = quantize.outputs
        bits.name, blocks.name = f"{self.name}/input_bits", f"{self.name}/input_blocks"
        self.graph.insert_before(self.node, quantize)
        scales = self._add("DequantizeLinear", [blocks, scale], "input_scales")
        return self._widen(bits, scales, "input")

    def _weight(self) -> ir.Value:
        *rows, last = self.form.shape
        values, block_scales = self._values(), self.format.block_scales
        if self.form.block is None:
            if self.form.scale_shape:
                scale = self._constant(self.node, np.float32(1), "one")
            else:
                scale = self._initializer(SCALE, FLOAT32, ())
            wide = int(self.dtype)
            return self._add("DequantizeLinear", [values, scale], "weight", output_dtype=wide)
        blocks = (*rows, last // self.form.block)
        if block_scales is None:
            # If these scales had another dtype, TensorRT would write the whole dequantized weight to memory.
            scales = self._initializer(BLOCK_SCALES, self.dtype, blocks)
            each = {"axis": -1, "block_size": self.form.block}
            return self._add("DequantizeLinear", [values, scales], "weight", **each)
        codes = self._initializer(BLOCK_SCALES, dtype_of(block_scales), blocks)
        scale = self._initializer(SCALE, FLOAT32, ())
        scales = self._add("DequantizeLinear", [codes, scale], "weight_scales")
        return self._widen(values, scales, "weight")

    def _widen(self, bits: ir.Value, scales: ir.Value, name: str) -> ir.Value:
        """Dequantize to float32, the only dtype that TensorRT allows for E2M1, then cast to the graph's dtype, which
        costs nothing."""
        wide = self._add(
            "DequantizeLinear", [bits, scales], f"{name}_wide", axis=-1, block_size=self.form.block
        )
        if self.dtype == FLOAT32:
            return wide
        return self._add("Cast", [wide], name, to=int(self.dtype))

    def _scale_outputs(self, product: ir.Value, old: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Multiply the product by its scales per output. Return the result, and the value that it replaces.

        If the DequantizeLinear had these scales, TensorRT would write the product in float32. A reshape to heads is
        moved before the multiplication, because TensorRT does not fuse multiplication and norm across a reshape.
        """
        scales = self._initializer(SCALE, FLOAT32, self.form.scale_shape)
        where, users = self.node, old.consumers()
        size = _last_size(users[0]) if len(users) == 1 else None
        if size is not None:
            where, old = users[0], users[0].outputs[0]
            by_head = self._constant(where, np.array([-1, size]), "by_head")
            scales = self._insert(where, "Reshape", [scales, by_head], "scales")
            shape = where.inputs[1]
            assert shape is not None
            product = self._insert(where, "Reshape", [product, shape], "heads", allowzero=1)
        if self.dtype != FLOAT32:
            product = self._insert(where, "Cast", [product], "wide", to=int(FLOAT32))
        product = self._insert(where, "Mul", [product, scales], "scaled")
        if self.dtype != FLOAT32:
            product = self._insert(where, "Cast", [product], "narrow", to=int(self.dtype))
        return product, old

    def _constant(self, before: ir.Node, data: Any, name: str) -> ir.Value:
        return self._insert(before, "Constant", [], name, value=ir.tensor(data))

    def _add(self, kind: str, inputs: list[ir.Value], name: str, **attributes: Any) -> ir.Value:
        return self._insert(self.node, kind, inputs, name, **attributes)

    def _find(self) -> ir.Node:
        """Return the product: a MatMul over the weight's transpose, or a Gemm that transposes it."""
        users = [node for node, _ in self.weight.uses()]
        if len(users) == 1 and users[0].op_type == "Transpose":
            users = [node for node, _ in users[0].outputs[0].uses()]
            if len(users) == 1 and users[0].op_type == "MatMul":
                return users[0]
        elif len(users) == 1 and _is_plain_gemm(users[0]):
            return users[0]
        raise CanvasError(
            f"{self.name} is not the weight of one matrix product, so it cannot be quantized",
            "exclude it in the recipe",
        )

    def _remove(self) -> None:
        transpose = self.node.inputs[1].producer() if self.node.inputs[1] is not None else None
        self.graph.remove(self.node, safe=True)
        if transpose is not None:
            self.graph.remove(transpose, safe=True)
        del self.graph.initializers[self.name]


def _last_size(node: ir.Node) -> int | None:
    """Return the last size of a Reshape's result; None if that size is not constant, or for any other node."""
    shape = node.inputs[1].producer() if node.op_type == "Reshape" and node.inputs[1] else None
    last = shape.inputs[-1] if shape is not None and shape.op_type == "Concat" else None
    size = None if last is None else ir.convenience.get_const_tensor(last)
    return None if size is None else int(size.numpy().item())


def _is_plain_gemm(node: ir.Node) -> bool:
    if node.op_type != "Gemm" or len(node.inputs) != 2:
        return False
    found = {name: attribute.value for name, attribute in node.attributes.items()}
    turned = found.get("transA", 0), found.get("transB", 0)
    return turned == (0, 1) and found.get("alpha", 1) == 1


def _read_cache(graph: ir.Graph, name: str, scale: ir.Value) -> None:
    """Change the graph's input `name` to E4M3. Nodes that read the input now read its dequantized value."""
    value = next(each for each in graph.inputs if each.name == name)
    assert value.dtype is not None
    node = ir.node(
        "DequantizeLinear", [value, scale], {"output_dtype": int(value.dtype)}, name=f"{name}/wide"
    )
    node.outputs[0].name = f"{name}/wide"
    value.replace_all_uses_with(node.outputs[0])
    node.replace_input_with(0, value)
    value.type = ir.TensorType(FLOAT8)
    graph.insert_before(graph[0], node)


def _write_cache(graph: ir.Graph, name: str, scale: ir.Value) -> None:
    """Change the graph's output `name` to E4M3."""
    index, value = next((i, v) for i, v in enumerate(graph.outputs) if v.name == name)
    node = ir.node(
        "QuantizeLinear", [value, scale], {"output_dtype": int(FLOAT8)}, name=f"{name}/bits"
    )
    value.name = f"{name}/wide"
    output = node.outputs[0]
    output.name, output.type, output.shape = name, ir.TensorType(FLOAT8), value.shape
    graph.outputs[index] = output
    graph.append(node)
