"""Edits graphs as protobufs, with weights left in external data: only what a CPU build needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

# onnx is imported inside functions: a serving image has this package, but not onnx.
if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

# ONNX Runtime's own operators.
CONTRIB = "com.microsoft"


def make_node(
    kind: str, inputs: list[str], outputs: list[str], name: str, **attributes: Any
) -> NodeProto:
    """Return a node; `domain` among the attributes is its operator's."""
    from onnx import helper

    return helper.make_node(kind, inputs, outputs, name, **attributes)


def users(graph: GraphProto, value: str) -> list[NodeProto]:
    """Return the nodes that read a value."""
    return [each for each in graph.node if value in each.input]


def integers(value: object, name: str) -> TensorProto:
    """Return an int64 initializer."""
    from onnx import numpy_helper

    return numpy_helper.from_array(np.array(value, dtype=np.int64), name)


def integers_of(graph: GraphProto, value: str) -> list[int]:
    """Return what a value holds that a Constant node or an initializer gives it, maybe cast or reshaped."""
    from onnx import numpy_helper
    from onnx.helper import get_attribute_value

    for tensor in graph.initializer:
        if tensor.name == value:
            return [int(each) for each in numpy_helper.to_array(tensor).ravel()]
    (node,) = (each for each in graph.node if value in each.output)
    if node.op_type in ("Cast", "Reshape"):
        return integers_of(graph, node.input[0])
    assert node.op_type == "Constant", f"{value} is not a constant"
    held = get_attribute_value(node.attribute[0])
    found = numpy_helper.to_array(held) if node.attribute[0].name == "value" else held
    return [int(each) for each in np.ravel(found)]


def replace(graph: GraphProto, old: NodeProto, new: list[NodeProto]) -> None:
    """Replace one node by others."""
    nodes = list(graph.node)
    place = next(number for number, each in enumerate(nodes) if each is old or each == old)
    del graph.node[:]
    graph.node.extend([*nodes[:place], *new, *nodes[place + 1 :]])


def import_contrib(model: ModelProto) -> None:
    """Import the domain of ONNX Runtime's operators into the model, once."""
    from onnx import helper

    if not any(opset.domain == CONTRIB for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(CONTRIB, 1))


def rows_of(tensor: TensorProto, first: int, count: int, name: str) -> TensorProto:
    """Return part of a tensor along its first axis as an initializer of its own, over the same external data."""
    from onnx import TensorProto

    external = {entry.key: entry.value for entry in tensor.external_data}
    row = int(external["length"]) // tensor.dims[0]
    part = TensorProto(
        name=name,
        data_type=tensor.data_type,
        dims=[count, *tensor.dims[1:]],
        data_location=TensorProto.EXTERNAL,
    )
    offset = int(external.get("offset", 0)) + first * row
    for key, value in (
        ("location", external["location"]),
        ("offset", str(offset)),
        ("length", str(count * row)),
    ):
        part.external_data.add(key=key, value=value)
    return part


def drop_unused(graph: GraphProto) -> None:
    """Remove the nodes and weights that no output needs any more."""
    wanted = {output.name for output in graph.output}
    kept: list[NodeProto] = []
    for node in reversed(graph.node):
        if wanted & set(node.output):
            kept.append(node)
            wanted |= set(node.input)
    used = [item for item in graph.initializer if item.name in wanted]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(reversed(kept))
    graph.initializer.extend(used)
