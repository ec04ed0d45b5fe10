"""Lowers graphs for ONNX Runtime on a CPU: all values are float32, and rounded exactly as in the quantized graph.

A CPU multiplies neither bfloat16 nor most quantized formats. So the lowered graph has dequantized weights, and rounds
activations to the same numbers in the same places. INT4 weights stay packed, and a function in the graph unpacks
them. Later, `nbits` and `cpu_experts` replace this function by MatMulNBits. Weights are streamed: only a piece is in
memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from canvasrt.formats import ALL_CODES, Codes, NumberFormat, rounding_format
from canvasrt.graphs import external, lowbits
from canvasrt.graphs.edit import drop_unused, initializer, input_of, insert, sizes_of
from canvasrt.graphs.external import Stored
from canvasrt.graphs.names import (
    BLOCK_SCALES,
    CODES,
    DOMAIN,
    FACTOR,
    SCALE,
    SCALES,
    TABLE_VALUES,
    UNPACK,
    VALUES,
)
from canvasrt.graphs.rounding import operator, rounding

_FLOAT, _BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
_PARTS = (VALUES, BLOCK_SCALES, SCALE, FACTOR)
# Attributes that name a dtype.
_DTYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
# How many numbers at a time are converted to float32, and how many bytes of INT4 codes at a time become unsigned.
_PIECE = 1 << 22


def lower_graph(source: Path, out: Path) -> None:
    """Write the graph file `source` to `out` in a form that ONNX Runtime runs on a CPU. Its weight files are written
    next to `out`, under the same names.

    Inputs and outputs keep their names, but bfloat16 and E4M3 become float32. An INT8 embedding table stays INT8.
    """
    model = ir.load(source)
    written = _rewrite_weights(model.graph)
    _round_inputs(model.graph)
    _lower_cache(model.graph)
    _widen_graph(model)
    drop_unused(model)
    for function in rounding(model.graph):
        model.functions[function.identifier()] = function
        model.opset_imports[function.domain] = 1
    own = source.with_suffix(".bin").name

    def items() -> Iterator[tuple[Stored, str | None]]:
        for name, value in model.graph.initializers.items():
            location = getattr(value.const_value, "location", own)
            apart = None if name in written or location == own else str(location)
            yield written.get(name) or _wide(value), apart

    external.write(model, items(), out)


def _rewrite_weights(graph: ir.Graph) -> dict[str, Stored]:
    """Replace every packed weight by its form for a CPU. Return the new initializers by name; their data is yet to be
    written."""
    written: dict[str, Stored] = {}
    packed = {name: value.dtype for name, value in graph.initializers.items()}
    for name in [name for name in packed if name.endswith(f".{VALUES}")]:
        if name == TABLE_VALUES:  # stays: `embedding_table` rewrites it later
            continue
        kind = _Int4Weight if packed[name] == ir.DataType.INT4 else _Weight
        items = kind(graph, name.removesuffix(f".{VALUES}")).rewrite()
        written |= {item.name: item for item in items}
    return written


class _Weight:
    """A packed weight of a graph, and its replacement."""

    def __init__(self, graph: ir.Graph, name: str) -> None:
        self.graph, self.name = graph, name
        values = {part: graph.initializers.get(f"{name}.{part}") for part in _PARTS}
        self.values = {part: value for part, value in values.items() if value is not None}
        self.tensors: dict[str, Any] = {part: v.const_value for part, v in self.values.items()}
        self.shape = tuple(sizes_of(self.values[VALUES]))

    def rewrite(self) -> list[Stored]:
        """Replace codes, scales and factor by one plain weight. Return the new initializers, whose data is yet to be
        written."""
        plain = initializer(self.graph, self.name, _FLOAT, self.shape)
        _dequantized(self.values[VALUES], cast=True).replace_all_uses_with(plain)
        for part in (SCALE, FACTOR):
            if part in self.values and (scaled := _multiplication(self.values[part])):
                scaled.outputs[0].replace_all_uses_with(input_of(scaled))
        return [Stored(self.name, _FLOAT, self.shape, self._read)]

    def _read(self) -> Iterator[memoryview]:
        """Yield the plain weight's bytes, one matrix at a time. Experts have one matrix each."""
        rank = len(self.shape)
        codes = _codes_of(self.tensors[VALUES])
        blocks = self.tensors.get(BLOCK_SCALES)
        scale = _floats(self.tensors[SCALE])
        factor = self.tensors.get(FACTOR)
        factors = None if factor is None else _floats(factor)
        data = {
            part: external.mapped(self.tensors[part]) for part in _PARTS[:2] if part in self.tensors
        }
        count = self.shape[0] if rank == 3 else 1
        for index in range(count):
            # The parts of this matrix, each `[out, …]`.
            parts = {part: x.reshape(count, self.shape[-2], -1)[index] for part, x in data.items()}
            wide = lowbits.scaled(
                lowbits.numbers_of(codes, parts[VALUES]),
                scale,
                parts.get(BLOCK_SCALES),
                None if blocks is None else _codes_of(blocks),
            )
            if factors is not None:
                wide = wide * factors.reshape(count, -1)[index][:, None]
            yield np.ascontiguousarray(wide).reshape(-1).view(np.uint8).data


def _multiplication(value: ir.Value) -> ir.Node | None:
    """Return the node that multiplies a matrix product by `value`, the scale or factor of the product's weight. Return
    None if there is no such node. The graph may reshape the value first."""
    for node in value.consumers():
        if node.op_type == "Reshape":
            return _multiplication(node.outputs[0])
        if node.op_type == "Mul":
            return node
    return None


class _Int4Weight(_Weight):
    """An INT4 weight. Its replacement is unsigned codes, each 8 above the signed code, and float32 scales."""

    def rewrite(self) -> list[Stored]:
        *rows, width = self.shape
        blocks = self.tensors[BLOCK_SCALES].shape.numpy()
        items = [
            Stored(self.name + CODES, ir.DataType.UINT8, (*rows, width // 2), self._codes),
            Stored(self.name + SCALES, _FLOAT, tuple(map(int, blocks)), self._scales),
        ]
        inputs = [initializer(self.graph, each.name, each.dtype, each.shape) for each in items]
        (dequantize,) = self.values[VALUES].consumers()
        name = f"{self.name}/unpacked"
        unpacked = insert(dequantize, UNPACK, inputs, name, domain=DOMAIN)
        dequantize.outputs[0].replace_all_uses_with(unpacked)
        return items

    def _scales(self) -> Iterator[memoryview]:
        scales = np.ascontiguousarray(_floats(self.tensors[BLOCK_SCALES]))
        yield scales.reshape(-1).view(np.uint8).data

    def _codes(self) -> Iterator[memoryview]:
        data = external.mapped(self.tensors[VALUES])
        for start in range(0, len(data), _PIECE):
            yield (data[start : start + _PIECE] ^ lowbits.INT4_OFFSET).data


def _round_inputs(graph: ir.Graph) -> None:
    """Replace the quantizers of activations by nodes that round.

    Each row is rounded by itself, so rounding can be moved before a gather, where there are fewer rows. The experts
    then keep the form that `cpu_experts.split_experts` expects.
    """
    for node in list(graph):
        kind = _quantizes_to(node)
        if kind is None or node.outputs[0].is_graph_output():
            continue
        x, scale = input_of(node), input_of(node, 1)
        last = _dequantized(node.outputs[0], cast=bool(node.domain))
        gather = x.producer()
        if gather is not None and gather.op_type == "Gather" and len(x.consumers()) == 1:
            gather.replace_input_with(0, _rounded(gather, kind, input_of(gather), scale))
            last.replace_all_uses_with(x)
        else:
            last.replace_all_uses_with(_rounded(node, kind, x, scale))


def _quantizes_to(node: ir.Node) -> NumberFormat | None:
    """Return the format that a node quantizes activations to; None if it does not quantize."""
    dtype = node.attributes.get("output_dtype")
    return rounding_format(node.op_type, ir.DataType(dtype.value).name if dtype else None)


def _rounded(before: ir.Node, kind: NumberFormat, x: ir.Value, scale: ir.Value) -> ir.Value:
    name = f"{scale.name}/rounded"
    output = insert(before, operator(kind), [x, scale], name, domain=DOMAIN)
    output.type, output.shape = ir.TensorType(_FLOAT), x.shape
    return output


def _dequantized(codes: ir.Value, cast: bool) -> ir.Value:
    """Return the output of the DequantizeLinear that reads `codes`, which has no other reader. If `cast` is true and a
    cast follows, return the cast's output instead."""
    (dequantize,) = codes.consumers()
    wide = dequantize.outputs[0]
    users = wide.consumers()
    is_cast = cast and [node.op_type for node in users] == ["Cast"]
    return users[0].outputs[0] if is_cast else wide


def _lower_cache(graph: ir.Graph) -> None:
    """Lower a quantized cache: the graph then reads it in float32, and rounds the float32 values that it writes."""
    for value in graph.inputs:
        if value.dtype is not None and value.dtype.name in ALL_CODES:
            (dequantize,) = value.consumers()
            dequantize.outputs[0].replace_all_uses_with(value)
            value.type = ir.TensorType(_FLOAT)
    for index, value in enumerate(list(graph.outputs)):
        node = value.producer()
        kind = None if node is None else _quantizes_to(node)
        if node is None or kind is None:
            continue
        rounded = _rounded(node, kind, input_of(node), input_of(node, 1))
        graph.outputs[index] = rounded
        rounded.name, value.name = value.name, f"{value.name}_codes"


def _widen_graph(model: ir.Model) -> None:
    """Turn everything in bfloat16 into float32, except the initializers' data."""
    graph = model.graph
    for node in graph.all_nodes():
        for name in _DTYPE_ATTRIBUTES:
            attribute = node.attributes.get(name)
            if attribute is not None and attribute.value == _BFLOAT16.value:
                node.attributes[name] = ir.AttrInt64(name, _FLOAT.value)
        constant = node.attributes.get("value")
        if constant is not None and getattr(constant.value, "dtype", None) == _BFLOAT16:
            wide = ir.tensor(constant.value.numpy().astype(np.float32))
            node.attributes["value"] = ir.AttrTensor("value", wide)
        for value in node.outputs:
            _widen_value(value)
    for value in (*graph.inputs, *graph.outputs):
        _widen_value(value)


def _widen_value(value: ir.Value) -> None:
    if value.dtype == _BFLOAT16:
        value.type = ir.TensorType(_FLOAT)


def _wide(value: ir.Value) -> Stored:
    """Return an initializer in float32 if it is bfloat16, else unchanged."""
    found = external.from_graph(value)
    if found.dtype != _BFLOAT16:
        return found
    assert value.const_value is not None
    bits = external.mapped(value.const_value).view(np.uint16)

    def pieces() -> Iterator[memoryview]:
        for start in range(0, len(bits), _PIECE):
            yield lowbits.from_bf16(bits[start : start + _PIECE]).view(np.uint8).data

    return replace(found, dtype=_FLOAT, read=pieces)


def _codes_of(tensor: Any) -> Codes:
    """Return the encoding of a quantized tensor's numbers."""
    return ALL_CODES[tensor.dtype.name]


def _floats(tensor: Any) -> np.ndarray:
    """Return a small bfloat16 or float32 tensor's values in float32."""
    return external.array(tensor).astype(np.float32)
