"""Experts for a CPU, which only multiply the rows that are routed to them.

The exported form, one batched product over expert slots, suits a GPU. On a CPU, empty slots waste time. In
addition, every expert's matrix becomes a constant, which ONNX Runtime packs ahead of time. This doubled the measured
throughput.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from canvasrt.checkpoints.weight_names import DOWN, GATE_UP
from canvasrt.graphs import nbits
from canvasrt.graphs.edit import (
    CONTRIB,
    all_outputs,
    ancestors,
    drop_unused,
    graph_input,
    input_of,
    insert,
    integers,
    integers_of,
    next_node,
    part,
    replace,
    sizes_of,
)
from canvasrt.graphs.names import CODES, DOMAIN, SLOTS, UNPACK


def split_experts(model: ir.Model) -> bool:
    """Rewrite the experts of every layer of a body graph in place. Return False if there is nothing to rewrite.

    Rows are sorted by expert, split into each expert's rows, and put back in order. No slots are needed, so the inputs
    that describe slots and the output `load` are removed. The weights stay where they are, in the graph's external
    data. Only plain and INT4 weights are handled; `lower` makes weights in all other formats plain first.
    """
    graph = model.graph
    weights = _weights(graph)
    layers = [name.removesuffix(GATE_UP) for name in weights if name.endswith(GATE_UP)]
    both = [(weights[name + GATE_UP], weights.get(name + DOWN)) for name in layers]
    if not layers or any(each is None or each.product is None for pair in both for each in pair):
        return False
    for name, (gate_up, down) in zip(layers, both, strict=True):
        assert down is not None
        _Layer(graph, name, gate_up, down).rewrite()
    graph.outputs.remove(next(each for each in graph.outputs if each.name == "load"))
    drop_unused(model)
    for value in [each for each in graph.inputs if each.name in SLOTS]:
        graph.inputs.remove(value)
    if any(each.scales is not None for each in weights.values()):
        model.opset_imports.setdefault(CONTRIB, 1)
    return True


class _Stack:
    """All experts' matrices `[E, out, in]`, as plain values or as INT4 codes and scales, and the node that multiplies
    by them."""

    def __init__(self, values: ir.Value, scales: ir.Value | None, plain: ir.Value) -> None:
        self.values, self.scales = values, scales
        self.experts, self.rows, self._width = sizes_of(values)
        self.product = self._find(plain)

    def _find(self, plain: ir.Value) -> ir.Node | None:
        """Return the MatMul that reads the transposed weight, or None if the graph has a different form or the weight
        is not external data."""
        node = plain
        for kind in ("Transpose", "MatMul"):
            users = node.consumers()
            if [each.op_type for each in users] != [kind]:
                return None
            node = users[0].outputs[0]
        external = isinstance(self.values.const_value, ir.ExternalTensor)
        return node.producer() if external else None

    def multiply(self, before: ir.Node, x: ir.Value, expert: int, name: str) -> ir.Value:
        """Multiply `x` by one expert's matrix, which becomes an initializer."""
        graph = before.graph
        assert graph is not None
        part_name = f"{self.values.name}.{expert}"
        if self.scales is None:
            matrix = part(graph, self.values, part_name, [self.rows, self._width], expert)
            return insert(before, "Gemm", [x, matrix], name, transB=1)
        blocks = nbits.block_shape(self.values, self.scales)
        codes = part(graph, self.values, part_name, blocks, expert)
        scales = part(graph, self.scales, f"{self.scales.name}.{expert}", blocks[:2], expert)
        return nbits.product(before, x, codes, scales, name, nbits.ACCURACY_INT8)


def _weights(graph: ir.Graph) -> dict[str, _Stack]:
    """Return the experts' stacked weights, plain or INT4, keyed by name."""
    found = {
        name: _Stack(value, None, value)
        for name, value in graph.initializers.items()
        if name.endswith((f".{GATE_UP}", f".{DOWN}"))
    }
    for node in graph:
        if node.op_type == UNPACK and len(sizes_of(input_of(node))) == 3:
            codes = input_of(node)
            name = str(codes.name).removesuffix(CODES)
            found[name] = _Stack(codes, input_of(node, 1), node.outputs[0])
    return found


class _Layer:
    """One layer's experts in an exported graph, found from their two weights."""

    def __init__(self, graph: ir.Graph, name: str, gate_up: _Stack, down: _Stack) -> None:
        assert gate_up.product is not None
        assert down.product is not None
        self._graph, self._gate_up, self._down = graph, gate_up, down
        self._prefix = f"{name}experts.sorted"
        gather = input_of(gate_up.product).producer()  # x[taken]: [E, C, D]
        assert gather is not None
        self._x = input_of(gather)
        chosen = next(n for n in ancestors(input_of(gather, 1)) if n.op_type == "TopK")
        self._index, counts = chosen.outputs[1], integers_of(chosen.inputs[1])
        assert counts is not None
        (self._top_k,) = counts
        rows = next_node(down.product.outputs[0], "Gather")  # result[row]: [k, T, D]
        weighted = next_node(rows.outputs[0], "Mul")
        turned = (n for n in ancestors(input_of(weighted, 1)) if n.op_type == "Transpose")
        self._shares = input_of(next(turned))  # [T, k]
        self._mixed = _sum(weighted)

    def rewrite(self) -> None:
        """Replace the experts by nodes that compute each token's weighted sum of results, `[1, T, D]`.

        Their inputs are `x` `[T, D]`, the chosen experts `[T, k]` and the experts' shares `[T, k]`.
        """
        inner, size = self._gate_up.rows // 2, self._down.rows
        order, sizes, place, top_k = self._sort()
        token = self._add("Div", [order, top_k], "token")
        rows = self._add("Gather", [self._x, token], "rows", axis=0)
        both = self._multiply(rows, sizes, self._gate_up, "gate_up")
        gate, up = self._split(both, self._constant("halves", [inner, inner]), ["gate", "up"], -1)
        gelu = self._add("Gelu", [gate], "gelu", approximate="tanh")
        gated = self._round(self._add("Mul", [gelu, up], "gated"))
        result = self._multiply(gated, sizes, self._down, "down")
        # A matrix product with the shares reads each token's rows once, and writes only their sum.
        back = self._add("Gather", [result, place], "back", axis=0)
        one_row = self._constant("one_row", [-1, 1, self._top_k])
        wide = self._add("Reshape", [self._shares, one_row], "weights")
        mixed = self._add("MatMul", [wide, back], "mixed")
        tokens_first = self._constant("tokens_first", [1, -1, size])
        total = self._add("Reshape", [mixed, tokens_first], "sum")
        replace(self._mixed.outputs[0], total)

    def _sort(self) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """Return the choices (k experts for every token) sorted by expert `[T·k]`, the number of choices per expert
        `[E]`, each choice's place in the sorted order `[T, k]`, and k."""
        zero, one = self._constant("zero", 0), self._constant("one", 1)
        top_k = self._constant("top_k", [self._top_k])
        flat = self._add("Reshape", [self._index, self._constant("all", [-1])], "flat")
        # All layers count the tokens with identical nodes, which ONNX Runtime merges and runs once.
        positions = graph_input(self._graph, "positions")
        tokens = self._add("Shape", [positions], "tokens")
        count = self._add("Mul", [self._add("ReduceProd", [tokens], "total"), top_k], "count")
        end = self._add("Squeeze", [count], "end")
        arange = self._add("Range", [zero, end, one], "arange")
        # Distinct keys make the order stable: by expert, then by token.
        key = self._add("Add", [self._add("Mul", [flat, count], "major"), arange], "key")
        smallest = {"axis": -1, "largest": 0, "sorted": 1}
        _, order = all_outputs(self._add("TopK", [key, count], "sorted", "order", **smallest))
        inverse = self._add("ScatterElements", [order, order, arange], "inverse", axis=0)
        by_token = self._constant("by_token", [-1, self._top_k])
        place = self._add("Reshape", [inverse, by_token], "place")
        zeros = self._constant("zeros", [0] * self._gate_up.experts)
        ones = self._add("Expand", [one, count], "ones")
        added = {"axis": 0, "reduction": "add"}
        sizes = self._add("ScatterElements", [zeros, flat, ones], "sizes", **added)
        return order, sizes, place, top_k

    def _round(self, gated: ir.Value) -> ir.Value:
        """Round `gated` as a quantized graph does before its second product. Each row is rounded by itself, so the
        order of rows does not matter."""
        assert self._down.product is not None
        node = input_of(self._down.product).producer()
        if node is None or node.domain != DOMAIN:
            return gated
        return self._add(node.op_type, [gated, input_of(node, 1)], "rounded", domain=DOMAIN)

    def _multiply(self, rows: ir.Value, sizes: ir.Value, weight: _Stack, what: str) -> ir.Value:
        """Multiply each expert's rows by its own matrix, and concatenate the results."""
        names = [f"{what}_{expert}" for expert in range(weight.experts)]
        outputs = [
            weight.multiply(self._mixed, x, expert, f"{self._prefix}/{names[expert]}_out")
            for expert, x in enumerate(self._split(rows, sizes, names, 0))
        ]
        return self._add("Concat", outputs, f"{what}_joined", axis=0)

    def _split(self, x: ir.Value, sizes: ir.Value, names: list[str], axis: int) -> list[ir.Value]:
        return list(all_outputs(self._add("Split", [x, sizes], *names, axis=axis)))

    def _add(self, kind: str, inputs: list[ir.Value], *names: str, **attributes: Any) -> ir.Value:
        full = [f"{self._prefix}/{name}" for name in names]
        return insert(self._mixed, kind, inputs, *full, **attributes)

    def _constant(self, name: str, value: object) -> ir.Value:
        return integers(self._graph, f"{self._prefix}/{name}", value)


def _sum(weighted: ir.Node) -> ir.Node:
    """Return the last node that adds up the results of a token's experts. Some graphs add them up in two halves."""
    node, users = weighted, weighted.outputs[0].consumers()
    while len(users) > 1 or users[0].op_type != "RMSNormalization":
        node = users[0]
        users = node.outputs[0].consumers()
    return node
