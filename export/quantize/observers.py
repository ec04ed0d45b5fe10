"""Adds observers to an exported graph: the largest magnitude of each weight's inputs, and which
experts are at work.

Only real rows count. Padding has position −1. An expert's empty slots hold other tokens' rows, so
its inputs are observed outside the slots: the first product's are the tokens themselves, and the
second product's are gathered by the tokens' slots, like the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from canvasrt.checkpoints.weight_names import DOWN, GATE_UP, ROUTER, TABLE
from canvasrt.errors import CanvasError

# The added outputs: float32 `[observed values]`, and int64 `[layers, experts]`, the tokens given to
# each expert.
AMAX, ROUTED = "observed_amax", "observed_routed"

_POSITIONS = "positions"


def observe(model: ir.Model, weights: Sequence[str], cached: Sequence[str], experts: int) -> None:
    """Add the output `AMAX`, and to a body graph `ROUTED`, in place.

    `AMAX` first holds the inputs of the products with `weights` (initializer names), then the
    values of the graph's outputs `cached` (new keys and values) at clean tokens, in these orders.
    Skip calls whose load overflowed the capacity: they observed wrong values.
    """
    observer = _Observer(model.graph)
    values = [observer.input_of(name) for name in weights]
    values += [observer.cached(name) for name in cached]
    if values:
        joined = observer.add("Concat", values, "amax", axis=0)
        observer.output(joined, AMAX, ir.DataType.FLOAT, [len(values)])
    if observer.is_body:
        routed, layers = observer.routed(experts)
        observer.output(routed, ROUTED, ir.DataType.INT64, [layers, experts])


class _Observer:
    """Adds nodes after those of a graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._count = 0
        inputs = {str(value.name): value for value in graph.inputs}
        self.is_body = _POSITIONS in inputs
        self._zero = self._constant(np.array(0, np.float32))
        if self.is_body:
            first = self._constant(np.array(0, np.int64))
            # Which of a body's rows `[B, L]` and tokens `[B·L]` are real.
            self._rows = self.add("GreaterOrEqual", [inputs[_POSITIONS], first], "rows")
            self._tokens = self._shaped(self._rows, [-1])
            clean = self.add("Unsqueeze", [inputs["causal"], self._axes(1)], "clean")
            self._clean = self.add("And", [self._rows, clean], "clean_rows")

    def input_of(self, name: str) -> ir.Value:
        """Return the largest magnitude `[1]` of the weight's input."""
        product = self._product(name)
        x = _input(product, 0)
        if not self.is_body:
            return self._amax(x, None)
        if name.endswith(GATE_UP):
            tokens = _input(_producer(x, "Gather", name), 0)
            return self._amax(tokens, self._wide(self._tokens, 1))
        if name.endswith(DOWN):
            slots = _input(self._next(product, "Gather", name), 1)  # [top_k, B·L]
            weight = self._graph.initializers[name].shape
            assert weight is not None
            flat = self._shaped(x, [-1, int(weight.numpy()[-1])])
            rows = self.add("Gather", [flat, slots], "slots", axis=0)
            return self._amax(rows, self._wide(self._tokens, 0, 2))
        if name.removesuffix(".weight").endswith(ROUTER):
            return self._amax(x, self._wide(self._tokens, 1))
        return self._amax(x, self._wide(self._tokens, 1))

    def cached(self, name: str) -> ir.Value:
        """Return the largest magnitude `[1]` of an output `[B, heads, L, head_dim]` at clean tokens."""
        value = next(each for each in self._graph.outputs if each.name == name)
        return self._amax(value, self._wide(self._clean, 1, 3))

    def routed(self, experts: int) -> tuple[ir.Value, int]:
        """Return the tokens given to each expert, `[layers, experts]`, and the number of layers."""
        number = self._constant(np.arange(experts))
        tokens = self._wide(self._tokens, 1, 2)
        layers = []
        for node in [each for each in self._graph if each.op_type == "TopK"]:
            chosen = self.add("Unsqueeze", [node.outputs[1], self._axes(2)], "chosen")
            hit = self.add("And", [self.add("Equal", [chosen, number], "hit"), tokens], "real_hit")
            ones = self.add("Cast", [hit], "ones", to=int(ir.DataType.INT64))
            counts = self.add("ReduceSum", [ones, self._axes(0, 1)], "counts", keepdims=0)
            layers.append(self._wide(counts, 0))
        return self.add("Concat", layers, "layers", axis=0), len(layers)

    def output(self, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int]) -> None:
        """Make a value an output of the graph."""
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
        self._graph.outputs.append(value)

    def add(self, kind: str, inputs: Sequence[ir.Value], name: str, **attributes: Any) -> ir.Value:
        """Append a node to the graph; return its output."""
        self._count += 1
        node = ir.node(kind, inputs, attributes, name=f"observer/{self._count}/{name}")
        node.outputs[0].name = node.name
        self._graph.append(node)
        return node.outputs[0]

    def _amax(self, x: ir.Value, real: ir.Value | None) -> ir.Value:
        """Return the largest magnitude `[1]` of `x` where the broadcastable `real` is true."""
        wide = self.add("Cast", [x], "wide", to=int(ir.DataType.FLOAT))
        magnitude = self.add("Abs", [wide], "magnitude")
        if real is not None:
            magnitude = self.add("Where", [real, magnitude, self._zero], "real")
        return self._shaped(self.add("ReduceMax", [magnitude], "largest", keepdims=0), [1])

    def _product(self, name: str) -> ir.Node:
        """Return the product with a weight: the MatMul over its transpose, or a Gemm."""
        users = [node for node, _ in self._graph.initializers[name].uses()]
        if name == TABLE:  # also looked up, and multiplied by probabilities, which never exceed 1
            users = [node for node in users if node.op_type == "Transpose"]
        if [node.op_type for node in users] == ["Transpose"]:
            users = [node for node, _ in users[0].outputs[0].uses()]
        if len(users) != 1 or users[0].op_type not in ("MatMul", "Gemm"):
            raise CanvasError(f"{name} is not the weight of one matrix product", "exclude it")
        return users[0]

    def _next(self, node: ir.Node, kind: str, name: str) -> ir.Node:
        """Return the first node of a kind along a chain of single users."""
        while True:
            users = [user for user, _ in node.outputs[0].uses() if not _is_observer(user)]
            if len(users) != 1:
                raise _unknown(name)
            (node,) = users
            if node.op_type == kind:
                return node

    def _wide(self, value: ir.Value, *axes: int) -> ir.Value:
        return self.add("Unsqueeze", [value, self._axes(*axes)], "wide")

    def _shaped(self, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        return self.add("Reshape", [value, self._axes(*shape)], "shaped")

    def _axes(self, *numbers: int) -> ir.Value:
        return self._constant(np.array(numbers, np.int64))

    def _constant(self, value: np.ndarray) -> ir.Value:
        self._count += 1
        node = ir.node("Constant", [], {"value": ir.tensor(value)}, name=f"observer/{self._count}")
        node.outputs[0].name = node.name
        self._graph.append(node)
        return node.outputs[0]


def _is_observer(node: ir.Node) -> bool:
    return str(node.name).startswith("observer/")


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _producer(value: ir.Value, kind: str, name: str) -> ir.Node:
    node = value.producer()
    if node is None or node.op_type != kind:
        raise _unknown(name)
    return node


def _unknown(name: str) -> CanvasError:
    return CanvasError(
        f"`canvasrt export` did not write the graph around {name}", "export it again"
    )
