"""Turns traced graphs into the graphs that an export writes: removes the metadata of torch's tracer, and joins
single-layer graphs into the graph of a segment.

Tracing a layer takes seconds, and layers of one kind have equal graphs. So each kind is traced once, and copied.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from canvasrt.graphs.edit import drop_unused, graph_input

# The metadata key under which torch's exporter stores a node's scopes. Some scopes are not modules.
_SCOPES = "pkg.torch.onnx.name_scopes"
_MODULE = re.compile(r"[a-z][\w.]*$")


def clean(model: ir.Model) -> None:
    """Name nodes after their modules, and remove metadata, whose stack traces would make files machine-dependent."""
    graph = model.graph
    for node in graph.all_nodes():
        node.name = _scoped_name(node)
        node.doc_string = None
        node.metadata_props.clear()
    values = (*graph.initializers.values(), *graph.inputs, *graph.outputs)
    holders: tuple[Any, ...] = (*values, model, graph)
    for each in holders:
        each.metadata_props.clear()


def _scoped_name(node: ir.Node) -> str:
    """Return the node's name, preceded by its module's name, as in `layers.0.attention/node_mul_182`."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    module = scopes[-2] if len(scopes) > 1 else ""
    return f"{module}/{node.name}" if _MODULE.match(module) else str(node.name)


def drop_weights(model: ir.Model, names: Collection[str]) -> None:
    """Let the weights in `names` refer to a file that does not exist. They keep their shape and dtype."""
    for name, value in model.graph.initializers.items():
        if name in names:
            tensor = value.const_value
            assert tensor is not None
            value.const_value = ir.ExternalTensor(
                "none", None, None, tensor.dtype, name=name, shape=ir.Shape(tensor.shape.numpy())
            )


def free_queues(model: ir.Model) -> None:
    """Make the size of `gate_queues` dynamic: E, or 1 if all experts share one queue. Torch cannot trace both sizes.

    Shapes of intermediate values are removed, because they can depend on the traced size.
    """
    graph_input(model.graph, "gate_queues").shape = ir.Shape(["gate_queues"])
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None


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
    _rename(graph, 0)
    for number, model in enumerate(layers[1:], 1):
        part = model.clone().graph
        pasts += _keys_and_values(part.inputs)
        news += _keys_and_values(part.outputs)
        for value in part.inputs:
            if value.name == "hidden":
                value.replace_all_uses_with(hidden)
            elif value not in pasts:
                shared = inputs.setdefault(value.name, value)
                if shared is not value:
                    value.replace_all_uses_with(shared)
        hidden, load = part.outputs[0], part.outputs[1]
        loads.append(load)
        _rename(part, number)
        _move(part, graph)
    hidden.name = "hidden_out"
    graph.inputs[:] = [*inputs.values(), *pasts]
    graph.outputs[:] = [hidden, _largest(graph, loads), *news]
    # This merges masks and rotations, which are the same in every layer of a kind.
    CommonSubexpressionEliminationPass()(joined)
    drop_unused(joined)
    return joined


def name_layers(model: ir.Model, layers: Sequence[int]) -> None:
    """Name a body graph's inputs for cached keys and values, and its outputs for new ones, by layer index."""
    for stem, values in (("past", model.graph.inputs), ("new", model.graph.outputs)):
        names = per_layer(stem, layers)
        for value, name in zip(values[len(values) - len(names) :], names, strict=True):
            value.name = name


def per_layer(stem: str, layers: Sequence[int]) -> list[str]:
    """Return the names of a key and a value per layer."""
    return [f"{stem}_{part}_{i}" for i in layers for part in ("key", "value")]


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


def _rename(graph: ir.Graph, number: int) -> None:
    """Rename the values and weights of `graph` to names that are unique over all layers."""
    for node in graph:
        node.name = _node_name(str(node.name), number)
        for value in node.outputs:
            value.name = f"layer_{number}/{value.name}"
    for value in list(graph.initializers.values()):
        if str(value.name).startswith("layers.0."):
            value.name = f"layers.{number}.{str(value.name).removeprefix('layers.0.')}"


def _node_name(name: str, number: int) -> str:
    """Return a node's name in the chain. It starts with the module's name, `layers.<number>.…`, if the node belongs to
    a module, and with `layer_<number>/` otherwise."""
    inside = name.removeprefix("layers.0")
    return f"layers.{number}{inside}" if inside != name else f"layer_{number}/{name}"


def _move(part: ir.Graph, graph: ir.Graph) -> None:
    """Move all nodes and weights of `part` into `graph`."""
    for name, value in list(part.initializers.items()):
        del part.initializers[name]
        if name in graph.initializers:
            value.replace_all_uses_with(graph.initializers[name])
        else:
            graph.initializers.add(value)
    part.outputs.clear()
    part.inputs.clear()
    nodes = list(part)
    part.remove(nodes)
    graph.extend(nodes)
