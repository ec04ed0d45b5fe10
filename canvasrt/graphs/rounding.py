"""Builds graph functions from standard operators: they round to quantized formats or unpack INT4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from canvasrt.formats import FORMATS, Codes, NumberFormat
from canvasrt.graphs import lowbits
from canvasrt.graphs.names import DOMAIN, UNPACK

_OPSET = 23
_FLOAT = ir.DataType.FLOAT.value


def operator(format: NumberFormat) -> str:
    """Return the name of the function that rounds to a format."""
    return f"Round_{format.name}"


def rounding(graph: ir.Graph) -> Iterator[ir.Function]:
    """Yield the functions of this module that the graph's nodes call."""
    called = {node.op_type for node in graph if node.domain == DOMAIN}
    for format in FORMATS.values():
        if operator(format) in called:
            fill = _in_blocks if format.blocks else _with_scale
            yield _function(operator(format), partial(fill, format=format))
    if UNPACK in called:
        yield _function(UNPACK, _unpack_int4)


class _Body:
    """The nodes of a function that has two inputs: a tensor `x` and its scale."""

    def __init__(self) -> None:
        self.x, self.scale = ir.Value(name="x"), ir.Value(name="scale")
        self.nodes: list[ir.Node] = []

    def add(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(kind, list(inputs), attributes)
        node.outputs[0].name = f"v{len(self.nodes)}"
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, value: Any, dtype: type[np.number[Any]] = np.float32) -> ir.Value:
        return self.add("Constant", value=ir.tensor(np.array(value, dtype)))

    def integers(self, *values: int) -> ir.Value:
        return self.constant(values, np.int64)

    def nearest(self, value: ir.Value, codes: Codes) -> ir.Value:
        """Round to the nearest number that these codes encode. Ties go to even; anything beyond the largest number
        becomes that number."""
        if codes.mantissa is None:
            most = self.constant(codes.largest)
            return self.add("Clip", self.add("Round", value), self.add("Neg", most), most)
        if codes.bits == 8:
            dtype = ir.DataType[codes.onnx].value
            return self.add("Cast", self.add("Cast", value, to=dtype, saturate=1), to=_FLOAT)
        return self._nearest_float(value, codes)

    def _nearest_float(self, value: ir.Value, codes: Codes) -> ir.Value:
        """Round in steps that double with the exponent: for E2M1, the step is ½ below 2, 1 from 2 to 4, and 2 above 4.
        ONNX Runtime cannot cast to 4-bit floats; its `Round` rounds ties to even."""
        every = lowbits.values_of(codes)
        numbers = every[: len(every) // 2]
        steps = np.diff(numbers)
        size, step = self.add("Abs", value), self.constant(steps[-1])
        for index in reversed(np.flatnonzero(np.diff(steps))):
            below = self.add("Less", size, self.constant(numbers[index + 1]))
            step = self.add("Where", below, self.constant(steps[index]), step)
        whole = self.add("Mul", self.add("Round", self.add("Div", size, step)), step)
        limited = self.add("Min", whole, self.constant(codes.largest))
        return self.add("Mul", self.add("Sign", value), limited)


def _function(name: str, fill: Callable[[_Body], ir.Value]) -> ir.Function:
    body = _Body()
    result = fill(body)
    graph = ir.Graph(
        [body.x, body.scale], [result], nodes=body.nodes, opset_imports={"": _OPSET}, name=name
    )
    return ir.Function(DOMAIN, name, graph=graph, attributes=[])


def _with_scale(body: _Body, format: NumberFormat) -> ir.Value:
    """Round to the nearest number that the format can represent at this scale."""
    rounded = body.nearest(body.add("Div", body.x, body.scale), format.codes)
    return body.add("Mul", rounded, body.scale)


def _in_blocks(body: _Body, format: NumberFormat) -> ir.Value:
    """Round each block with its own scale. The scale is the block's largest magnitude divided by the largest code,
    and is itself rounded to the scales' format. If the result is 0, the whole block becomes 0."""
    codes = format.block_scales
    assert codes is not None
    shape = body.add("Shape", body.x)
    rows = body.add("Shape", body.x, start=0, end=-1)
    blocked = body.add("Concat", rows, body.integers(-1, format.blocks[0]), axis=0)
    blocks = body.add("Reshape", body.x, blocked)
    largest = body.add("ReduceMax", body.add("Abs", blocks), body.integers(-1), keepdims=1)
    share = body.add("Div", largest, body.constant(format.codes.largest))
    scales = body.add("Mul", body.nearest(body.add("Div", share, body.scale), codes), body.scale)
    positive = body.add("Greater", scales, body.constant(0))
    safe = body.add("Where", positive, scales, body.constant(1))
    rounded = body.nearest(body.add("Div", blocks, safe), format.codes)
    return body.add("Reshape", body.add("Mul", rounded, scales), shape)


def _unpack_int4(body: _Body) -> ir.Value:
    """Dequantize unsigned INT4 codes, two per byte, each 8 above the signed code; `scale` is `[…, in / block]`."""
    low = body.add("BitwiseAnd", body.x, body.constant(15, np.uint8))
    high = body.add("BitShift", body.x, body.constant(4, np.uint8), direction="RIGHT")
    last = body.integers(-1)
    pairs = [body.add("Unsqueeze", each, last) for each in (low, high)]
    codes = body.add("Cast", body.add("Concat", *pairs, axis=-1), to=_FLOAT)
    values = body.add("Sub", codes, body.constant(8))
    blocks = body.add("Shape", body.scale)
    blocked = body.add("Reshape", values, body.add("Concat", blocks, last, axis=0))
    wide = body.add("Mul", blocked, body.add("Unsqueeze", body.scale, last))
    rows = body.add("Shape", body.scale, start=0, end=-1)
    return body.add("Reshape", wide, body.add("Concat", rows, last, axis=0))
