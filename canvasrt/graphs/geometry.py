"""Moves masks, rotations and sizes, which only depend on positions, to a graph that runs once per block.

In a small model, a quarter of the body nodes would otherwise compute these values again in every pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from canvasrt.defaults import CALL_LENGTH
from canvasrt.graphs import external
from canvasrt.graphs.edit import drop_unused
from canvasrt.graphs.names import PAST

# Prefixes of the inputs that are equal for all bodies of a pass, unlike hidden states and the KV cache.
_FIXED = ("positions", "groups", "causal", "past_positions_")


def split_geometry(bodies: Sequence[ir.Model]) -> ir.Model:
    """Move the body graphs' nodes that only depend on positions to a new graph, and return that graph.

    Bodies are rewritten in place, and read the new graph's outputs as inputs. If several bodies need a value, all of
    them read the same output. Rewritten bodies take cached keys and values as `[B, kv_heads, O * 8, head_dim]`.
    """
    geometry = _Geometry()
    taken = [geometry.take(body.graph) for body in bodies]
    outputs = list(dict.fromkeys(value for each in taken for value in each.values()))
    graph = ir.Graph(
        list(geometry.inputs.values()),
        outputs,
        nodes=geometry.nodes,
        initializers=list(geometry.weights.values()),
        opset_imports=dict(bodies[0].opset_imports),
        name="geometry",
    )
    model = ir.Model(graph, ir_version=bodies[0].ir_version)
    ShapeInferencePass()(model)
    for value in outputs:
        assert value.shape is not None, f"the shape of {value.name} is unknown"
        # Names of dynamic sizes are only valid within one graph.
        value.shape = ir.Shape([each if isinstance(each, int) else None for each in value.shape])
    for body, values in zip(bodies, taken, strict=True):
        _read_geometry(body, values)
    return model


class _Geometry:
    """The new graph. Identical nodes of several bodies are merged."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.inputs: dict[str, ir.Value] = {}
        self.weights: dict[str, ir.Value] = {}
        self._made: dict[tuple[object, ...], ir.Node] = {}

    def take(self, graph: ir.Graph) -> dict[ir.Value, ir.Value]:
        """Add a body's nodes that depend on positions alone. Return a mapping from each value that the rest
        of the body reads from them to the equal value in this graph."""
        _ask_positions_for_sizes(graph)
        _take_flat_pasts(graph)
        here: dict[ir.Value, ir.Value] = {}
        inputs = {value for value in graph.inputs if str(value.name).startswith(_FIXED)}
        constant = {value for value in graph.initializers.values() if _is_shared(value)}
        for node in graph:
            read = {value for value in node.inputs if value is not None}
            if read <= constant:  # constants stay in their graph
                constant |= set(node.outputs)
            elif read <= here.keys() | inputs | constant:
                names = [None if each is None else self._value(each, here) for each in node.inputs]
                here |= zip(node.outputs, self._add(node, names).outputs, strict=True)
        moved = {made for value in here if (made := value.producer()) is not None}
        return {
            value: there
            for value, there in here.items()
            if value.is_graph_output() or not moved.issuperset(value.consumers())
        }

    def _value(self, value: ir.Value, here: dict[ir.Value, ir.Value]) -> ir.Value:
        """Return this graph's equivalent of a body's value."""
        if value in here:
            return here[value]
        node = value.producer()
        if node is not None:  # it computes a constant
            inputs = [None if each is None else self._value(each, here) for each in node.inputs]
            return self._add(node, inputs).outputs[value.index() or 0]
        if value.is_initializer():
            return self._weight(value)
        known = ir.val(value.name, type=value.type, shape=value.shape)
        return self.inputs.setdefault(str(value.name), known)

    def _add(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Node:
        attributes = [
            ir.to_proto(each).SerializeToString() for _, each in sorted(node.attributes.items())
        ]
        key = (node.op_type, node.domain, *attributes, *inputs)
        if key not in self._made:
            stem = f"geometry_{len(self._made)}"
            made = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                list(node.attributes.values()),
                num_outputs=len(node.outputs),
                name=stem,
            )
            for number, value in enumerate(made.outputs):
                value.name = f"{stem}_{number}" if number else stem
            self._made[key] = made
            self.nodes.append(made)
        return self._made[key]

    def _weight(self, value: ir.Value) -> ir.Value:
        """Return this graph's copy of a body's weight, named by a hash of its content."""
        tensor = value.const_value
        assert tensor is not None
        data = external.array(tensor)
        about = f"{tensor.dtype.name} {list(data.shape)} ".encode()
        name = f"weight_{hashlib.sha256(about + data.tobytes()).hexdigest()[:16]}"
        known = ir.val(name, const_value=ir.tensor(data, name=name))
        return self.weights.setdefault(name, known)


def _is_shared(value: ir.Value) -> bool:
    """Return whether an initializer is a constant rather than a layer's learnt weight."""
    return not str(value.name).startswith("layers.")


def _ask_positions_for_sizes(graph: ir.Graph) -> None:
    """Make the graph read the number of cached octets from the shape of the cached positions, not from the shapes of
    the cached keys and values."""
    positions = {
        _size(value, 1): value
        for value in graph.inputs
        if str(value.name).startswith("past_positions_")
    }
    for past in _pasts(graph):
        for node in past.consumers():
            if node.op_type != "Shape":
                continue
            bounds = [node.attributes[name].as_int() for name in ("start", "end")]
            assert bounds == [2, 3], "a past's other sizes are known"
            node.replace_input_with(0, positions[_size(past, 2)])
            node.attributes["start"], node.attributes["end"] = (
                ir.AttrInt64("start", 1),
                ir.AttrInt64("end", 2),
            )


def _take_flat_pasts(graph: ir.Graph) -> None:
    """Give the inputs for cached keys and values the shape that a Reshape gives them now, and remove the Reshape."""
    for past in _pasts(graph):
        for node in past.consumers():
            assert node.op_type == "Reshape", f"{past.name} is read as octets"
            node.outputs[0].replace_all_uses_with(past)
            graph.remove(node, safe=True)
        assert past.shape is not None
        batch, heads, octets, _, size = past.shape
        tokens = ir.SymbolicDim(str(octets).replace("octets", "tokens"))
        past.shape = ir.Shape([batch, heads, tokens, size])


def _pasts(graph: ir.Graph) -> list[ir.Value]:
    return [value for value in graph.inputs if str(value.name).startswith(PAST)]


def _size(value: ir.Value, axis: int) -> str:
    """Return the name of the dynamic size of an axis."""
    assert value.shape is not None
    return str(value.shape[axis])


def _read_geometry(body: ir.Model, values: dict[ir.Value, ir.Value]) -> None:
    """Make a body read the geometry graph's values as inputs instead of computing them."""
    graph = body.graph
    given: dict[str, ir.Value] = {}
    for value, there in values.items():
        assert not value.is_graph_output(), "a body returns a value that only depends on positions"
        name = str(there.name)
        known = ir.Value(name=name, type=there.type, shape=there.shape)
        value.replace_all_uses_with(given.setdefault(name, known))
    drop_unused(body)
    for value in [each for each in graph.inputs if not each.uses()]:
        graph.inputs.remove(value)
    length = ir.Value(
        name=CALL_LENGTH, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([0, None])
    )
    graph.inputs.extend([*given.values(), length])
