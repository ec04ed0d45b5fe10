"""Makes inner values of graphs visible, as additional inputs and outputs."""

from __future__ import annotations

import onnx_ir as ir

from canvasrt.graphs.edit import graph_input, input_of, insert
from canvasrt.graphs.names import LOGITS


def with_logits(model: ir.Model) -> ir.Model:
    """Add the logits to a head's outputs, and return the head. The logits are the value that its sampler divides by the
    temperature. A shortened sampler multiplies a value by cap / temperature instead; the logits are then this value
    times the cap."""
    divisions = [node for node in model.graph if node.op_type == "Div"]
    (divided,) = (node for node in divisions if _source(node.inputs[1]) == "temperature")
    factor = [node for node, place in divided.outputs[0].uses() if place]
    logits = [input_of(divided)]
    if factor and factor[0].op_type == "Mul":
        logits.insert(0, input_of(factor[0]))
    _add_output(model.graph, logits, LOGITS, ir.Shape(["batch", "length", "vocabulary"]))
    return model


def _source(value: ir.Value | None) -> str | None:
    """Return the name of the graph input from which a value was reshaped. If the value is an input, return its name."""
    while value is not None and (node := value.producer()) is not None and node.inputs:
        value = node.inputs[0]
    return value.name if value is not None else None


def cut_layers(model: ir.Model, count: int) -> ir.Model:
    """Return a body segment of `count` layers, cut at every layer.

    Layers k > 0 read an input `hidden_k`, and all layers but the last write an output `hidden_out_k`. So one run
    computes every layer, each on a separate input.
    """
    graph = model.graph
    hidden = graph_input(graph, "hidden")
    assert hidden.shape is not None
    shape = ir.Shape(["batch", "length", hidden.shape[2]])
    for k in range(1, count):
        norm = graph.initializers[f"layers.{k}.input_norm.weight"]
        border = input_of(next(node for node in graph if norm in node.inputs))
        given = ir.val(f"hidden_{k}", ir.DataType.FLOAT, shape)
        border.replace_all_uses_with(given)
        graph.inputs.append(given)
        _add_output(graph, [border], f"hidden_out_{k - 1}", shape)
    return model


def _add_output(graph: ir.Graph, factors: list[ir.Value], name: str, shape: ir.Shape) -> None:
    """Make the product of values an output. The rest of the graph does not change."""
    value = insert(graph, "Mul" if factors[1:] else "Identity", factors, name)
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), shape
    graph.outputs.append(value)
