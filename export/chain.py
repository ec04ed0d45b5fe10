"""Joins single-layer graphs into the graph of a segment.

Tracing a layer takes seconds, and layers of one kind have equal graphs. So each kind is traced once, and copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from canvasrt.export.onnx import OPSET


def chain(layers: Sequence[ir.Model]) -> ir.Model:
    """Return one graph that runs the single-layer graphs one after another.

    Inputs and buffers of the same name are merged. A layer's `hidden` is the previous layer's `hidden_out`. The output
    `load` lists each layer's largest load. Each traced graph names its weights `layers.0.…`; those of layer k are
    renamed to `layers.k.…`. Keys and values are ordered by layer.
    """
    joined = layers[0].clone()
    graph = joined.graph
    pasts, news = _keys_and_values(graph.inputs), _keys_and_values(graph.outputs)
    inputs = {value.name: value for value in graph.inputs if value not in pasts}
    hidden, loads = graph.outputs[0], [graph.outputs[1]]
    _rename(graph, 0, kept=graph.inputs)
    for number, model in enumerate(layers[1:], 1):
        part = model.clone().graph
        pasts += _keys_and_values(part.inputs)
        news += _keys_and_values(part.outputs)
        for value in list(part.inputs):
            if value.name == "hidden":
                ir.convenience.replace_all_uses_with(value, hidden)
            elif value not in pasts:
                shared = inputs.setdefault(value.name, value)
                if shared is not value:
                    ir.convenience.replace_all_uses_with(value, shared)
        hidden, load = part.outputs[0], part.outputs[1]
        loads.append(load)
        _rename(part, number, kept=part.inputs)
        _move(part, graph)
    hidden.name = "hidden_out"
    graph.inputs[:] = [*inputs.values(), *pasts]
    graph.outputs[:] = [hidden, _largest(graph, loads), *news]
    joined.opset_imports[""] = OPSET
    # This merges masks and rotations, which are the same in every layer of a kind.
    CommonSubexpressionEliminationPass()(joined)
    RemoveUnusedNodesPass()(joined)
    return joined


def _largest(graph: ir.Graph, loads: Sequence[ir.Value]) -> ir.Value:
    """Add nodes that compute every layer's largest load, `[layers]` int64, in one kernel."""
    for index, load in enumerate(loads):
        load.name = f"loads_{index}"
    axis = ir.node("Constant", [], {"value": ir.tensor([1])}, name="node_load_axis")
    stacked = ir.node("Concat", loads, {"axis": 0}, name="node_loads")
    both = [stacked.outputs[0], axis.outputs[0]]
    largest = ir.node("ReduceMax", both, {"keepdims": 0}, name="node_largest")
    wide = ir.node("Cast", largest.outputs, {"to": int(ir.DataType.INT64)}, name="node_load")
    graph.extend([axis, stacked, largest, wide])
    (load,) = wide.outputs
    load.name, load.type = "load", ir.TensorType(ir.DataType.INT64)
    load.shape = ir.Shape([len(loads)])
    return load


def _keys_and_values(values: Sequence[ir.Value]) -> list[ir.Value]:
    return [
        value for value in values if str(value.name).startswith(("past_key", "past_value", "new_"))
    ]


def _rename(graph: ir.Graph, number: int, kept: Sequence[ir.Value]) -> None:
    """Rename the values and weights of `graph` to names that are unique over all layers."""
    names = {id(value) for value in kept}
    for node in graph:
        node.name = _node_name(str(node.name), number)
        for value in node.outputs:
            if id(value) not in names:
                value.name = f"layer_{number}/{value.name}"
    for value in list(graph.initializers.values()):
        if str(value.name).startswith("layers.0."):
            value.name = f"layers.{number}.{str(value.name).removeprefix('layers.0.')}"


def _node_name(name: str, number: int) -> str:
    """Return a node's name in the chain. For a node of a module, the name starts with the module's name,
    `layers.<number>.…`; for any other node, with `layer_<number>/`."""
    inside = name.removeprefix("layers.0")
    return f"layers.{number}{inside}" if inside != name else f"layer_{number}/{name}"


def _move(part: ir.Graph, graph: ir.Graph) -> None:
    """Move all nodes and weights of `part` into `graph`."""
    for name, value in list(part.initializers.items()):
        del part.initializers[name]
        if name in graph.initializers:
            ir.convenience.replace_all_uses_with(value, graph.initializers[name])
        else:
            graph.initializers.add(value)
    part.outputs.clear()
    part.inputs.clear()
    nodes = list(part)
    part.remove(nodes)
    graph.extend(nodes)
