"""What positions alone decide, in a graph of its own: masks, rotations and sizes stay the same for all passes of a block.

In a small model, a quarter of a body's nodes compute them, in every pass.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from canvasrt.defaults import CALL_LENGTH
from canvasrt.graphs.protos import drop_unused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

# The inputs of a body that a pass does not change, beside cached keys and values.
_FIXED = ("positions", "groups", "causal", "past_positions_")
_PAST = ("past_key_", "past_value_")


def split_geometry(bodies: Sequence[ModelProto], folder: Path) -> ModelProto:
    """Move all nodes of body graphs that only positions decide into one graph, and return it.

    Bodies are rewritten in place. They take what they need of it as inputs of the same names, so equal values of several
    bodies are one, and cached keys and values as `[B, kv_heads, O * 8, head_dim]`. Small weights are read from `folder`.
    """
    from onnx import helper, shape_inference

    made = _Geometry(folder)
    wanted = [made.take(body.graph) for body in bodies]
    first = bodies[0]
    names = list(dict.fromkeys(name for each in wanted for name in each.values()))
    outputs = [helper.make_empty_tensor_value_info(name) for name in names]
    graph = helper.make_graph(
        made.nodes, "geometry", list(made.inputs.values()), outputs, list(made.weights.values())
    )
    model = helper.make_model(graph, ir_version=first.ir_version, opset_imports=first.opset_import)
    model = shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    for each in model.graph.output:
        for dim in each.type.tensor_type.shape.dim:
            dim.ClearField("dim_param")  # names that mean nothing elsewhere
    types = {each.name: each for each in model.graph.output}
    for body, taken in zip(bodies, wanted, strict=True):
        _give(body.graph, taken, types)
    return model


class _Geometry:
    """The nodes so far. Equal ones of several bodies are one."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[NodeProto] = []
        self.inputs: dict[str, ValueInfoProto] = {}
        self.weights: dict[str, TensorProto] = {}
        self._folder = folder
        self._made: dict[tuple[object, ...], list[str]] = {}

    def take(self, graph: GraphProto) -> dict[str, str]:
        """Add what a body computes from positions. Return the name here of each value that its other nodes read."""
        _ask_positions_for_sizes(graph)
        _take_flat_pasts(graph)
        # What a layer has learnt stays with it.
        weights = {e.name: e for e in graph.initializer if not e.name.startswith("layers.")}
        inputs = {each.name: each for each in graph.input if each.name.startswith(_FIXED)}
        constant = set(weights)
        here: dict[str, str] = {}
        for node in graph.node:
            read = {each for each in node.input if each}
            if constant >= read:  # each graph keeps its own constants
                constant |= set(node.output)
                continue
            if not (here.keys() | inputs.keys() | constant) >= read:
                continue
            self.inputs |= {name: inputs[name] for name in node.input if name in inputs}
            names = [
                each if each in inputs else here.get(each) or self._constant(graph, weights, each)
                for each in node.input
            ]
            here |= zip(node.output, self._add(node, names), strict=True)
        kept = [node for node in graph.node if not here.keys() >= set(node.output)]
        read = {each for node in kept for each in node.input}
        read |= {each.name for each in graph.output}
        return {value: name for value, name in here.items() if value in read}

    def _add(self, node: NodeProto, inputs: list[str]) -> list[str]:
        attributes = sorted(each.SerializeToString() for each in node.attribute)
        key = (node.op_type, node.domain, *attributes, *inputs)
        if key not in self._made:
            from onnx import NodeProto as Node

            new = Node()
            new.CopyFrom(node)
            del new.input[:], new.output[:]
            stem = f"geometry_{len(self._made)}"
            self._made[key] = [f"{stem}_{i}" if i else stem for i in range(len(node.output))]
            new.name = stem
            new.input.extend(inputs)
            new.output.extend(self._made[key])
            self.nodes.append(new)
        return self._made[key]

    def _constant(self, graph: GraphProto, weights: dict[str, TensorProto], value: str) -> str:
        """Return the name here of a weight or constant of a body."""
        if not value:
            return ""
        if value not in weights:
            (node,) = (each for each in graph.node if value in each.output)
            return self._add(node, [self._constant(graph, weights, each) for each in node.input])[
                list(node.output).index(value)
            ]
        weight = _loaded(weights[value], self._folder)
        name = f"weight_{hashlib.sha256(weight.SerializeToString()).hexdigest()[:16]}"
        weight.name = name
        self.weights[name] = weight
        return name


def _loaded(weight: TensorProto, folder: Path) -> TensorProto:
    """Return a nameless copy of a weight that holds its data itself."""
    from onnx import TensorProto as Tensor

    external = {entry.key: entry.value for entry in weight.external_data}
    copy = Tensor(data_type=weight.data_type, dims=weight.dims)
    if external:
        # onnx reads no linked files, which these may be.
        with (folder / external["location"]).open("rb") as file:
            file.seek(int(external.get("offset", 0)))
            copy.raw_data = file.read(int(external["length"]))
    else:
        copy.CopyFrom(weight)
        copy.ClearField("name")
    return copy


def _ask_positions_for_sizes(graph: GraphProto) -> None:
    """Read the length of a past off its positions instead of its keys."""
    octets = {
        each.type.tensor_type.shape.dim[1].dim_param: each.name
        for each in graph.input
        if each.name.startswith("past_positions_")
    }
    pasts = {
        each.name: octets[each.type.tensor_type.shape.dim[2].dim_param]
        for each in graph.input
        if each.name.startswith(_PAST)
    }
    for node in graph.node:
        if node.op_type == "Shape" and node.input[0] in pasts:
            bounds = {each.name: each for each in node.attribute}
            assert (bounds["start"].i, bounds["end"].i) == (2, 3), "a past's other sizes are known"
            node.input[0] = pasts[node.input[0]]
            bounds["start"].i, bounds["end"].i = 1, 2


def _take_flat_pasts(graph: GraphProto) -> None:
    """Take cached keys and values in the shape that a Reshape gave them."""
    pasts = {each.name: each for each in graph.input if each.name.startswith(_PAST)}
    flat: dict[str, str] = {}
    kept = []
    for node in graph.node:
        if node.op_type == "Reshape" and node.input[0] in pasts:
            flat[node.output[0]] = node.input[0]
            continue
        for place, value in enumerate(node.input):
            node.input[place] = flat.get(value, value)
            assert value not in pasts or value in flat.values(), f"{value} is read as octets"
        kept.append(node)
    for each in pasts.values():
        shape = each.type.tensor_type.shape
        batch, heads, octets, _, size = (
            type(dim).FromString(dim.SerializeToString()) for dim in shape.dim
        )
        octets.dim_param = octets.dim_param.replace("octets", "tokens")
        del shape.dim[:]
        shape.dim.extend([batch, heads, octets, size])
    del graph.node[:]
    graph.node.extend(kept)


def _give(graph: GraphProto, taken: dict[str, str], types: dict[str, ValueInfoProto]) -> None:
    """Make a body read the geometry's values as inputs."""
    from onnx import TensorProto, helper

    outputs = {each.name for each in graph.output}
    assert not outputs & taken.keys(), "a body returns what positions decide"
    for node in graph.node:
        for place, value in enumerate(node.input):
            node.input[place] = taken.get(value, value)
    drop_unused(graph)
    read = {each for node in graph.node for each in node.input}
    kept = [each for each in graph.input if each.name in read]
    del graph.input[:]
    graph.input.extend([*kept, *(types[name] for name in dict.fromkeys(taken.values()))])
    graph.input.append(helper.make_tensor_value_info(CALL_LENGTH, TensorProto.BOOL, [0, None]))
