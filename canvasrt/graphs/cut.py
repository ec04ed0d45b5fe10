"""Cuts a body graph at its experts, which our kernels compute between the pieces.

Piece k ends with the inputs of layer k's experts; piece k + 1 begins with these experts' output rows. All nodes
except the experts' are kept, so results equal the whole graph's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from canvasrt.checkpoints.weight_names import DOWN, GATE_UP
from canvasrt.errors import CanvasError
from canvasrt.graphs.edit import (
    ancestors,
    drop_unused,
    graph_input,
    initializer,
    input_of,
    insert,
    integers,
    integers_of,
    next_node,
)
from canvasrt.graphs.names import (
    CARRIED,
    EXPERT_INDEX,
    EXPERT_INPUT,
    EXPERT_ROWS,
    OUT,
    SHARES,
    SLOTS,
)


@dataclass(frozen=True)
class _Cut:
    """The names of the values at one layer's experts.

    own: the experts' input `[T, D]`; scale: the scale of this input if it is in FP8, else None; index: each token's
    experts, int64 `[T, K]`; shares: the routing weights of these experts, float32 `[T, K]`; rows: the experts' output
    `[K, T, D]`; carried: the values `[1, T, D]` that the next piece also needs.
    """

    own: str
    scale: str | None
    index: str
    shares: str
    rows: str
    carried: tuple[str, ...]


def cut_body(model: ir.Model) -> list[ir.Model]:
    """Return the pieces of a body graph: one more than the graph has layers. Weights stay in their files.

    Each piece keeps the graph's inputs that it needs and the outputs that it computes, except slots and `load`. At the
    cuts, tokens have two axes, B and L. `own` (the experts' input) and carried values are `[B, L, D]`. `shares` is
    float32 `[B, L, K]`, `index` is int32 `[B, L, K]`, and `expert_rows` is `[K, B, L, D]`. For FP8 experts, `own` is
    in E4M3.

    Raises CanvasError for a graph whose experts do not have the exported form.
    """
    layers = sum(str(value.name).startswith("new_key_") for value in model.graph.outputs)
    cuts = _find(model.graph, layers)
    return [_piece(model, cuts, number) for number in range(layers + 1)]


class _Experts:
    """One layer's experts in a body graph, plain or quantized."""

    def __init__(self, graph: ir.Graph, number: int) -> None:
        gate_up, down = (f"layers.{number}.{each}" for each in (GATE_UP, DOWN))
        taken = input_of(_product(graph, gate_up), 0)
        gather = next(node for node in ancestors(taken) if node.op_type == "Gather")
        self.own = input_of(gather, 0)
        codes = graph.initializers.get(f"{gate_up}.values")
        in_fp8 = codes is not None and codes.dtype == ir.DataType.FLOAT8E4M3FN
        self.scale = f"{gate_up}.input_scale" if in_fp8 else None
        chosen = next(n for n in ancestors(input_of(gather, 1)) if n.op_type == "TopK")
        self.index = chosen.outputs[1]
        self.rows = next_node(_product(graph, down).outputs[0], "Gather").outputs[0]
        self.weighted = next_node(self.rows, "Mul")
        side = next(v for v in self.weighted.inputs if v is not None and v is not self.rows)
        # The nodes that turn the shares of a token's experts into factors of the token's rows.
        self.between: list[ir.Node] = []
        for node in ancestors(side):
            self.between.append(node)
            if node.op_type == "Transpose":
                break
        self.shares = input_of(self.between[-1], 0)


def _find(graph: ir.Graph, layers: int) -> list[_Cut]:
    try:
        experts = [_Experts(graph, number) for number in range(layers)]
    except (StopIteration, ValueError, KeyError) as error:
        raise _other_form() from error
    stages = _stages(graph, experts)
    cuts = []
    for number, each in enumerate(experts):
        carried = _crossing(graph, stages, number, {each.shares, each.rows})
        own, index, shares, rows = (
            str(v.name) for v in (each.own, each.index, each.shares, each.rows)
        )
        cuts.append(_Cut(own, each.scale, index, shares, rows, tuple(carried)))
    return cuts


def _stages(graph: ir.Graph, experts: Iterable[_Experts]) -> dict[ir.Value, int]:
    """Return the stage of every value: the number of layers on whose experts the value depends.

    Values that depend on no hidden state, such as masks, have no stage, because every piece computes them itself.
    """
    stages = {graph_input(graph, "hidden"): 0}
    late: dict[ir.Node, int] = {}
    for number, each in enumerate(experts, 1):
        stages[each.rows] = number
        late |= dict.fromkeys(each.between, number)
    for node in graph:
        known = [stages[value] for value in node.inputs if value in stages]
        if known and node.op_type != "Shape":
            for value in node.outputs:
                stages.setdefault(value, late.get(node, max(known)))
    return stages


def _crossing(
    graph: ir.Graph, stages: Mapping[ir.Value, int], stage: int, experts: set[ir.Value]
) -> list[str]:
    """Return the names of values that belong to `stage` and are read in the next stage. Values in `experts` are left
    out."""
    found: dict[str, None] = {}
    # Nodes inside the experts are not wanted: they lead only to `load`, and to the rows, which are in `experts`.
    outputs = [value for value in graph.outputs if value.name != "load"]
    wanted = set(ancestors(*outputs, given=experts))
    for node in graph:
        if node not in wanted or all(stages.get(value) != stage + 1 for value in node.outputs):
            continue
        for value in node.inputs:
            if value is not None and stages.get(value) == stage and value not in experts:
                found[str(value.name)] = None
    if len(found) != len(CARRIED):
        raise _other_form()
    return list(found)


def _other_form() -> CanvasError:
    return CanvasError(
        "the graph's experts are not in the form that this version exports",
        "export the graphs again with this version",
    )


def _piece(model: ir.Model, cuts: list[_Cut], number: int) -> ir.Model:
    made = model.clone()
    piece = _Piece(made.graph)
    inputs = [value for value in made.graph.inputs if value.name not in SLOTS]
    if number:
        inputs += piece.take(cuts[number - 1])
    if number < len(cuts):
        outputs = piece.hand_out(cuts[number], number)
    else:
        outputs = [value for value in made.graph.outputs if value.name == "hidden_out"]
    made.graph.inputs[:] = inputs
    made.graph.outputs[:] = outputs
    drop_unused(made)
    made.graph.inputs[:] = [value for value in made.graph.inputs if value.uses()]
    return made


class _Piece:
    """A copy of the whole graph that is reduced to one piece."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._values = {str(value.name): value for node in graph for value in node.outputs}
        hidden = graph_input(graph, "hidden")
        assert hidden.shape is not None
        assert hidden.dtype is not None
        self._batch, self._length, width = hidden.shape
        self._width, self._dtype = int(width), hidden.dtype  # type: ignore[arg-type]

    def take(self, cut: _Cut) -> list[ir.Value]:
        """Replace the values before a cut by inputs, and return the inputs."""
        choices = self._choices(cut)
        taken = [
            self._take(name, old, self._dtype, [1, -1, self._width])
            for name, old in zip(CARRIED, cut.carried, strict=True)
        ]
        taken.append(self._take(SHARES, cut.shares, ir.DataType.FLOAT, [-1, choices]))
        rows = [choices, -1, self._width]
        return [*taken, self._take(EXPERT_ROWS, cut.rows, self._dtype, rows, only_valid=True)]

    def hand_out(self, cut: _Cut, layer: int) -> list[ir.Value]:
        """Return the piece's outputs: the values at the cut, and one layer's new keys and values."""
        tokens = self._add("Shape", [graph_input(self._graph, "positions")], "tokens")
        choices = self._choices(cut)
        own = self._values[cut.own]
        dtype = self._dtype
        if cut.scale is not None:
            scale = self._graph.initializers[cut.scale]
            dtype = ir.DataType.FLOAT8E4M3FN
            own = self._add("QuantizeLinear", [own, scale], "own_bits", output_dtype=int(dtype))
        index = self._values[cut.index]
        index = self._add("Cast", [index], "index_narrow", to=int(ir.DataType.INT32))
        handed = [
            self._hand(EXPERT_INPUT, own, dtype, tokens, self._width),
            self._hand(EXPERT_INDEX, index, ir.DataType.INT32, tokens, choices),
            self._hand(SHARES + OUT, self._values[cut.shares], ir.DataType.FLOAT, tokens, choices),
        ]
        for name, old in zip(CARRIED, cut.carried, strict=True):
            handed.append(
                self._hand(name + OUT, self._values[old], self._dtype, tokens, self._width)
            )
        new = [v for v in self._graph.outputs if str(v.name).startswith("new_")]
        return [*handed, *new[2 * layer : 2 * layer + 2]]

    def _take(
        self,
        name: str,
        old: str,
        dtype: ir.DataType,
        shape: list[int],
        only_valid: bool = False,
    ) -> ir.Value:
        """Replace a value by a new input, which has two token axes instead of one. Return the input.

        With `only_valid`, rows of padding are read as zeros, because no kernel writes them.
        """
        axis = shape.index(-1)
        before = [each for each in shape[:axis] if each != 1]
        dims = [*before, self._batch, self._length, *shape[axis + 1 :]]
        value, first = ir.val(name, dtype, ir.Shape(dims)), self._graph[0]
        taken = self._add("Reshape", [value, self._constant(shape, name)], name, first)
        if only_valid:
            taken = self._without_padding(taken, first)
        self._values[old].replace_all_uses_with(taken)
        return value

    def _without_padding(self, rows: ir.Value, first: ir.Node) -> ir.Value:
        """Replace padding tokens' rows in `rows`, `[K, T, D]`, by zeros. Nodes are inserted before `first`."""
        inputs = [graph_input(self._graph, "positions"), self._constant([0], "padding")]
        valid = self._add("GreaterOrEqual", inputs, "valid", first)
        shape = self._constant([1, -1, 1], "valid")
        column = self._add("Reshape", [valid, shape], "valid_rows", first)
        zero = ir.tensor([0.0], dtype=self._dtype, name="cut/nothing")
        nothing = initializer(self._graph, "cut/nothing", data=zero)
        return self._add("Where", [column, rows, nothing], "kept_rows", first)

    def _hand(
        self, name: str, value: ir.Value, dtype: ir.DataType, tokens: ir.Value, width: int
    ) -> ir.Value:
        """Return an output: `value` in the shape `[B, L, width]`."""
        last = self._constant([width], f"{name}_width")
        shape = self._add("Concat", [tokens, last], f"{name}_shape", axis=0)
        made = self._add("Reshape", [value, shape], name)
        made.name = name
        made.type = ir.TensorType(dtype)
        made.shape = ir.Shape([self._batch, self._length, width])
        return made

    def _choices(self, cut: _Cut) -> int:
        """Return the number of experts per token, which is a constant input of the TopK."""
        chosen = self._values[cut.index].producer()
        count = integers_of(input_of(chosen, 1)) if chosen else None
        assert count is not None
        return count[0]

    def _add(
        self,
        kind: str,
        inputs: list[ir.Value],
        name: str,
        before: ir.Node | None = None,
        **attributes: Any,
    ) -> ir.Value:
        where = before or self._graph
        return insert(where, kind, inputs, f"cut/{name}", suffix="", **attributes)

    def _constant(self, numbers: list[int], name: str) -> ir.Value:
        return integers(self._graph, f"cut/{name}_sizes", numbers)


def _product(graph: ir.Graph, weight: str) -> ir.Node:
    """Return the MatMul that multiplies by a weight. The weight is stored either plain or as codes."""
    stored = graph.initializers.get(weight) or graph.initializers[f"{weight}.values"]
    return next_node(stored, "MatMul")
