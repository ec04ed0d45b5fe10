"""Experts for a CPU: each expert's product has exactly its own rows.

The exported form, one batched product over expert slots, suits a GPU. On a CPU, empty slots waste time,
and ONNX Runtime packs only constant matrices ahead, which doubled the measured throughput.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from canvasrt.checkpoints import weight_names
from canvasrt.graphs import nbits
from canvasrt.graphs.protos import (
    drop_unused,
    import_contrib,
    integers,
    integers_of,
    make_node,
    rows_of,
)

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

_INT64 = 7  # onnx.TensorProto.INT64
# The domain of the functions that round the inputs of quantized products in a lowered graph.
DOMAIN = "canvasrt"
# The inputs that the exported form takes for its slots.
SLOTS = ("slots", "gate_slots", "gate_queues")
_GATE_UP, _DOWN = f".{weight_names.GATE_UP}", f".{weight_names.DOWN}"


def split_experts(model: ModelProto) -> bool:
    """Rewrite the experts of every layer of a body graph in place. Return False if there is nothing to rewrite.

    Rows are sorted by expert, split at the experts' counts, and put back in order. No slots are needed, so those inputs
    and the output `load` go away. The weights stay where they are, in the graph's external data.
    Only plain and INT4 weights are handled; `lower` makes the others plain first.
    """
    graph = model.graph
    weights = _weights(graph)
    names = [name.removesuffix(_GATE_UP) for name in weights if name.endswith(_GATE_UP)]
    layers = [
        _Layer(graph, name, weights[name + _GATE_UP], weights.get(name + _DOWN)) for name in names
    ]
    if not layers or not all(layer.found for layer in layers):
        return False
    for layer in layers:
        layer.rewrite()
    (load,) = (each for each in graph.output if each.name == "load")
    graph.output.remove(load)
    drop_unused(graph)
    for each in [value for value in graph.input if value.name in SLOTS]:
        graph.input.remove(each)
    if any(isinstance(weight, _Int4) for weight in weights.values()):
        import_contrib(model)
    return True


class _Stack:
    """All experts' matrices `[out, in]`, stacked; `value` is the value that the exported form transposes."""

    def __init__(self, values: TensorProto, value: str) -> None:
        self._values, self.value = values, value
        self.experts, self.rows = values.dims[0], values.dims[1]

    @property
    def is_external(self) -> bool:
        """Whether it can be split without copying."""
        return bool(self._values.external_data)

    def product(self, graph: GraphProto, x: str, expert: int, output: str) -> NodeProto:
        """Return the node that multiplies `x` by one expert's matrix, which becomes an initializer."""
        matrix = _slice(self._values, expert)
        graph.initializer.append(matrix)
        return make_node("Gemm", [x, matrix.name], [output], output + "_node", transB=1)


class _Int4(_Stack):
    """A stack of INT4 matrices."""

    def __init__(self, codes: TensorProto, scales: TensorProto, value: str) -> None:
        super().__init__(codes, value)
        self._scales = scales

    def product(self, graph: GraphProto, x: str, expert: int, output: str) -> NodeProto:
        codes, scales = (_slice(each, expert) for each in (self._values, self._scales))
        block = nbits.cut_blocks(codes, scales)
        graph.initializer.extend([codes, scales])
        return nbits.product(x, codes, scales, block, output, nbits.ACCURACY_INT8)


def _weights(graph: GraphProto) -> dict[str, _Stack]:
    """Return the experts' weights by name, plain or in INT4."""
    stored = {item.name: item for item in graph.initializer}
    found = {
        name: _Stack(item, name)
        for name, item in stored.items()
        if name.endswith((_GATE_UP, _DOWN))
    }
    for node in graph.node:
        if node.op_type == nbits.UNPACK and len(stored[node.input[0]].dims) == 3:
            codes, scales = (stored[name] for name in node.input)
            name = codes.name.removesuffix(nbits.CODES)
            found[name] = _Int4(codes, scales, node.output[0])
    return found


class _Layer:
    """One layer's experts in an exported graph, found from their two weights."""

    def __init__(self, graph: GraphProto, name: str, gate_up: _Stack, down: _Stack | None) -> None:
        self._graph = graph
        self._producer = {value: node for node in graph.node for value in node.output}
        self._gate_up, self._down = gate_up, down
        self._prefix = f"{name}.sorted"
        self._new: list[NodeProto] = []
        self._products = [
            None if weight is None else self._product(weight.value) for weight in (gate_up, down)
        ]

    @property
    def found(self) -> bool:
        """Whether the layer has the exported form, with its weights in external data."""
        both = (self._gate_up, self._down)
        return all(each is not None and each.is_external for each in both) and all(self._products)

    def rewrite(self) -> None:
        """Add the sorted form next to the old one, and pass its result on."""
        first, last = self._products
        assert first is not None
        assert last is not None
        gather = self._producer[first.input[0]]  # x[taken]: [E, C, D]
        x = gather.input[0]
        index = next(n for n in self._ancestors(gather.input[1]) if n.op_type == "TopK").output[1]
        chosen = self._next(last.output[0], "Gather")  # result[row]: [k, T, D]
        weighted = self._next(chosen.output[0], "Mul")
        turned = (n for n in self._ancestors(weighted.input[1]) if n.op_type == "Transpose")
        weights = next(turned).input[0]  # [T, k]
        mixed = self._sum(weighted)
        wanted = mixed.output[0]
        mixed.output[0] = f"{self._prefix}/unused"
        self._emit(x, index, weights, wanted)
        self._insert_after(x, index, weights)

    def _sum(self, weighted: NodeProto) -> NodeProto:
        """Return the node that ends the sum over a token's experts: in one piece, or in halves."""
        users = self._users(weighted.output[0])
        while len(users) > 1 or users[0].op_type != "RMSNormalization":
            last = users[0]
            users = self._users(last.output[0])
        return last

    def _emit(self, x: str, index: str, weights: str, wanted: str) -> None:
        """Map `x` `[T, D]`, `index` and `weights` `[T, k]` to each token's weighted sum `wanted` `[1, T, D]`."""
        assert self._down is not None
        inner = self._gate_up.rows // 2
        order, sizes, top_k = self._sort(index)
        token = self._add("Div", [order, top_k], "token")
        rows = self._add("Gather", [x, token], "rows", axis=0)
        both = self._multiply(rows, sizes, self._gate_up, "gate_up")
        halves = self._constant("halves", [inner, inner])
        self._add("Split", [both, halves], "gate", "up", axis=-1)
        gate = self._add("Gelu", [self._name("gate")], "gelu", approximate="tanh")
        gated = self._add("Mul", [gate, self._name("up")], "gated")
        gated = self._round(gated)
        result = self._multiply(gated, sizes, self._down, "down")
        # A product with the weights reads each token's rows once, and writes nothing of their size.
        back = self._add("Gather", [result, self._name("place")], "back", axis=0)
        one_row = self._constant("one_row", [-1, 1, self._top_k(index)])
        wide = self._add("Reshape", [weights, one_row], "weights")
        mixed = self._add("MatMul", [wide, back], "mixed")
        shape = self._constant("tokens_first", [1, -1, self._down.rows])
        self._new.append(make_node("Reshape", [mixed, shape], [wanted], self._name("sum")))

    def _round(self, gated: str) -> str:
        """Return `gated` as a quantized graph's second product sees it. Rounding is by row, so
        order does not matter."""
        last = self._products[1]
        assert last is not None
        node = self._producer[last.input[0]]
        if node.domain != DOMAIN:
            return gated
        return self._add(node.op_type, [gated, node.input[1]], "rounded", domain=node.domain)

    def _sort(self, index: str) -> tuple[str, str, str]:
        """Return the order `[T·k]` by expert, the experts' counts `[E]`, and k; emit `place` `[T, k]` too."""
        zero, one = self._constant("zero", 0), self._constant("one", 1)
        top_k = self._constant("top_k", [self._top_k(index)])
        flat = self._add("Reshape", [index, self._constant("all", [-1])], "flat")
        # Every layer asks for the number of tokens in these words, and ONNX Runtime answers once.
        tokens = self._add("Shape", ["positions"], "tokens")
        count = self._add("Mul", [self._add("ReduceProd", [tokens], "total"), top_k], "count")
        end = self._add("Squeeze", [count], "end")
        arange = self._add("Range", [zero, end, one], "arange")
        # Distinct keys make the order stable: by expert, then by token.
        major = self._add("Mul", [flat, count], "major")
        key = self._add("Add", [major, arange], "key")
        self._add("TopK", [key, count], "sorted", "order", axis=-1, largest=0, sorted=1)
        order = self._name("order")
        inverse = self._add("ScatterElements", [order, order, arange], "inverse", axis=0)
        shape = self._constant("by_token", [-1, self._top_k(index)])
        self._add("Reshape", [inverse, shape], "place")
        zeros = self._constant("zeros", [0] * self._gate_up.experts)
        ones = self._add("Expand", [one, count], "ones")
        self._add("ScatterElements", [zeros, flat, ones], "sizes", axis=0, reduction="add")
        sizes = self._name("sizes")
        return order, sizes, top_k

    def _top_k(self, index: str) -> int:
        """Return how many experts a token has, which the exported graph has as a constant."""
        (count,) = integers_of(self._graph, self._producer[index].input[1])
        return count

    def _multiply(self, rows: str, sizes: str, weight: _Stack, what: str) -> str:
        """Multiply each expert's rows by its own matrix, and concatenate the results."""
        parts = [f"{what}_{expert}" for expert in range(weight.experts)]
        self._add("Split", [rows, sizes], *parts, axis=0)
        outputs = [self._name(f"{part}_out") for part in parts]
        self._new += [
            weight.product(self._graph, self._name(part), expert, output)
            for expert, (part, output) in enumerate(zip(parts, outputs, strict=True))
        ]
        return self._add("Concat", outputs, f"{what}_joined", axis=0)

    def _product(self, weight: str) -> NodeProto | None:
        """Return the MatMul over the weight's transpose."""
        transposes = self._users(weight)
        if [node.op_type for node in transposes] != ["Transpose"]:
            return None
        products = self._users(transposes[0].output[0])
        return products[0] if [node.op_type for node in products] == ["MatMul"] else None

    def _users(self, value: str) -> list[NodeProto]:
        return [node for node in self._graph.node if value in node.input]

    def _next(self, value: str, kind: str) -> NodeProto:
        """Return the first node of a kind along a chain of single users."""
        while True:
            (node,) = self._users(value)
            if node.op_type == kind:
                return node
            value = node.output[0]

    def _ancestors(self, value: str) -> Iterator[NodeProto]:
        """Yield the nodes that a value comes from, nearest first."""
        queue, seen = [value], {value}
        while queue:
            node = self._producer.get(queue.pop(0))
            if node is not None:
                yield node
                queue += [name for name in node.input if name not in seen]
                seen.update(node.input)

    def _insert_after(self, *values: str) -> None:
        """Insert the new nodes after their inputs and before their result is used."""
        nodes = list(self._graph.node)
        made = [i for i, node in enumerate(nodes) if set(values) & set(node.output)]
        del self._graph.node[:]
        self._graph.node.extend(nodes[: max(made) + 1] + self._new + nodes[max(made) + 1 :])

    def _name(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _add(self, kind: str, inputs: list[str], *outputs: str, **attributes: Any) -> str:
        """Add a node with outputs of these short names; return the first one's full name."""
        names = [self._name(output) for output in outputs]
        self._new.append(make_node(kind, inputs, names, names[0] + "_node", **attributes))
        return names[0]

    def _constant(self, name: str, value: object) -> str:
        full = self._name(name)
        self._graph.initializer.append(integers(value, full))
        return full


def _slice(stack: TensorProto, expert: int) -> TensorProto:
    """Return one expert's part of a stacked tensor."""
    part = rows_of(stack, expert, 1, f"{stack.name}.{expert}")
    del part.dims[0]
    return part
