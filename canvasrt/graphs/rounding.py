"""Rounding to FP8 and NVFP4, and unpacking INT4, as functions inside the graph, in standard operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from canvasrt.graphs.experts import DOMAIN
from canvasrt.graphs.lowbits import BLOCK, E2M1_MAX
from canvasrt.graphs.nbits import UNPACK

ROUND_FP8, ROUND_NVFP4 = "RoundFP8", "RoundNVFP4"
_OPSET = 23
_FLOAT, _E4M3 = ir.DataType.FLOAT.value, ir.DataType.FLOAT8E4M3FN.value


def rounding(graph: ir.Graph) -> Iterator[ir.Function]:
    """Return the functions that the nodes of a graph call."""
    called = {node.op_type for node in graph if node.domain == DOMAIN}
    for name, body in ((ROUND_FP8, _fp8), (ROUND_NVFP4, _nvfp4), (UNPACK, _int4)):
        if name in called:
            yield _function(name, body)


class _Body:
    """A function's nodes; its inputs are a tensor `x` and what scales it."""

    def __init__(self) -> None:
        self.x, self.scale = ir.Value(name="x"), ir.Value(name="scale")
        self.nodes: list[ir.Node] = []

    def add(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(kind, list(inputs), attributes)
        node.outputs[0].name = f"v{len(self.nodes)}"
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, value: float) -> ir.Value:
        return self.add("Constant", value=ir.tensor(np.array(value, np.float32)))

    def byte(self, value: int) -> ir.Value:
        return self.add("Constant", value=ir.tensor(np.array(value, np.uint8)))

    def integers(self, *values: int) -> ir.Value:
        return self.add("Constant", value=ir.tensor(np.array(values, np.int64)))

    def to_e4m3(self, value: ir.Value) -> ir.Value:
        """Return the nearest E4M3 number, ties to even, saturating."""
        return self.add("Cast", self.add("Cast", value, to=_E4M3, saturate=1), to=_FLOAT)


def _function(name: str, fill: Any) -> ir.Function:
    body = _Body()
    result = fill(body)
    graph = ir.Graph(
        [body.x, body.scale], [result], nodes=body.nodes, opset_imports={"": _OPSET}, name=name
    )
    return ir.Function(DOMAIN, name, graph=graph, attributes=[])


def _fp8(body: _Body) -> ir.Value:
    """Build `lowbits.round_fp8`."""
    rounded = body.to_e4m3(body.add("Div", body.x, body.scale))
    return body.add("Mul", rounded, body.scale)


def _nvfp4(body: _Body) -> ir.Value:
    """Build `lowbits.round_nvfp4`."""
    shape = body.add("Shape", body.x)
    rows = body.add("Shape", body.x, start=0, end=-1)
    blocked = body.add("Concat", rows, body.integers(-1, BLOCK), axis=0)
    blocks = body.add("Reshape", body.x, blocked)
    largest = body.add("ReduceMax", body.add("Abs", blocks), body.integers(-1), keepdims=1)
    sixth = body.add("Div", largest, body.constant(E2M1_MAX))
    scales = body.add("Mul", body.to_e4m3(body.add("Div", sixth, body.scale)), body.scale)
    positive = body.add("Greater", scales, body.constant(0))
    safe = body.add("Where", positive, scales, body.constant(1))
    rounded = _to_e2m1(body, body.add("Div", blocks, safe))
    return body.add("Reshape", body.add("Mul", rounded, scales), shape)


def _int4(body: _Body) -> ir.Value:
    """Build `lowbits.dequantize_int4` for unsigned codes (plus 8); `scale` is `[…, in / block]`."""
    low = body.add("BitwiseAnd", body.x, body.byte(15))
    high = body.add("BitShift", body.x, body.byte(4), direction="RIGHT")
    last = body.integers(-1)
    pairs = [body.add("Unsqueeze", each, last) for each in (low, high)]
    codes = body.add("Cast", body.add("Concat", *pairs, axis=-1), to=_FLOAT)
    values = body.add("Sub", codes, body.constant(8))
    blocks = body.add("Shape", body.scale)
    blocked = body.add("Reshape", values, body.add("Concat", blocks, last, axis=0))
    wide = body.add("Mul", blocked, body.add("Unsqueeze", body.scale, last))
    rows = body.add("Shape", body.scale, start=0, end=-1)
    return body.add("Reshape", wide, body.add("Concat", rows, last, axis=0))


def _to_e2m1(body: _Body, value: ir.Value) -> ir.Value:
    """Return the nearest E2M1 number, saturating. Steps are ½ below 2, 1 below 4, then 2; ONNX
    rounds ties to even."""
    size = body.add("Abs", value)
    two, four = body.constant(2), body.constant(4)
    upper = body.add("Where", body.add("Less", size, four), body.constant(1), two)
    step = body.add("Where", body.add("Less", size, two), body.constant(0.5), upper)
    whole = body.add("Mul", body.add("Round", body.add("Div", size, step)), step)
    limited = body.add("Min", whole, body.constant(E2M1_MAX))
    return body.add("Mul", body.add("Sign", value), limited)
