"""Edits loaded graphs, and leaves their weights in external data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

# ONNX Runtime's own operators.
CONTRIB = "com.microsoft"
_STILL_CONSTANT = ("Constant", "Transpose", "Cast", "Reshape", "Unsqueeze", "Mul")


def insert(
    where: ir.Node | ir.Graph,
    kind: str,
    inputs: Sequence[ir.Value | None],
    *names: str,
    domain: str = "",
    suffix: str = "_node",
    **attributes: Any,
) -> ir.Value:
    """Insert a node before the node `where`, or at the end of the graph `where`. Return its first output.

    `names` are the outputs' names; an empty name omits an output. The node's own name is the first name plus `suffix`.
    """
    node = ir.node(
        kind,
        inputs,
        attributes,
        domain=domain,
        outputs=[ir.val(name) for name in names],
        name=f"{names[0]}{suffix}",
    )
    if isinstance(where, ir.Graph):
        where.append(node)
    else:
        assert where.graph is not None
        where.graph.insert_before(where, node)
    return node.outputs[0]


def all_outputs(value: ir.Value) -> Sequence[ir.Value]:
    """Return all outputs of the node that computes `value`."""
    node = value.producer()
    assert node is not None
    return node.outputs


def replace(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new` everywhere; `new` gets the name of `old`."""
    new.type, new.shape = old.type, old.shape
    new.name, old.name = old.name, f"{old.name}_before"
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def drop_unused(model: ir.Model) -> None:
    """Remove the nodes and weights that no output depends on."""
    RemoveUnusedNodesPass()(model)


def input_of(node: ir.Node, place: int = 0) -> ir.Value:
    """Return a node's input number `place`. Raises ValueError if the node omits that input."""
    value = node.inputs[place]
    if value is None:
        raise ValueError(f"{node.name} has no input {place}")
    return value


def graph_input(graph: ir.Graph, name: str) -> ir.Value:
    """Return the graph's input `name`."""
    (found,) = (value for value in graph.inputs if value.name == name)
    return found


def made_by(value: ir.Value | None, kind: str) -> ir.Node | None:
    """Return the node that computes a value, or None if its operator is not `kind`."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == kind else None


def user(value: ir.Value, kind: str) -> ir.Node:
    """Return the only node with the operator `kind` that reads `value`."""
    (found,) = (node for node in value.consumers() if node.op_type == kind)
    return found


def next_node(value: ir.Value, kind: str) -> ir.Node:
    """Return the first node with the operator `kind` after `value`. Every value on the way must have one reader."""
    while True:
        (node,) = value.consumers()
        if node.op_type == kind:
            return node
        value = node.outputs[0]


def ancestors(*values: ir.Value, given: Collection[ir.Value] = ()) -> Iterator[ir.Node]:
    """Yield all nodes that compute `values`, directly or not, nearest first. Nodes that are only needed for values
    in `given` are left out."""
    queue, seen = [each for each in values if each not in given], {*values, *given}
    while queue:
        node = queue.pop(0).producer()
        if node is not None:
            yield node
            fresh = [each for each in node.inputs if each is not None and each not in seen]
            queue += fresh
            seen.update(fresh)


def is_constant(value: ir.Value) -> bool:
    """Return whether a value depends on no input of the graph: it is a weight or constant, possibly transposed, cast or
    scaled."""
    node = value.producer()
    if node is None:
        return value.is_initializer()
    return node.op_type in _STILL_CONSTANT and all(
        each is not None and is_constant(each) for each in node.inputs
    )


def integers_of(value: ir.Value | None) -> list[int] | None:
    """Return a constant's integers, even if the graph casts or reshapes it; None for any other value."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in ("Cast", "Reshape"):
            break
        value = node.inputs[0]
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or isinstance(tensor, ir.ExternalTensor):
        return None
    return [int(each) for each in tensor.numpy().ravel()]


def integers(graph: ir.Graph, name: str, values: object) -> ir.Value:
    """Add an int64 initializer."""
    return initializer(graph, name, data=ir.tensor(np.array(values, np.int64), name=name))


def part(
    graph: ir.Graph, whole: ir.Value, name: str, shape: Sequence[int], first: int = 0
) -> ir.Value:
    """Add an initializer that shares bytes of another initializer, `whole`. The bytes begin at index `first` of the
    first axis of `whole`."""
    tensor = whole.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    row = tensor.nbytes // tensor.shape.numpy()[0]
    length = int(np.prod(shape, dtype=np.int64)) * tensor.dtype.bitwidth // 8
    shared = ir.ExternalTensor(
        location=tensor.location,
        offset=int(tensor.offset or 0) + first * row,
        length=length,
        dtype=tensor.dtype,
        shape=ir.Shape(shape),
        name=name,
        base_dir=tensor.base_dir,
    )
    return initializer(graph, name, data=shared)


def initializer(
    graph: ir.Graph,
    name: str,
    dtype: ir.DataType | None = None,
    shape: Sequence[int] | None = None,
    data: ir.TensorProtocol | None = None,
) -> ir.Value:
    """Add an initializer with `data`, or with only a dtype and a shape if its data is written later."""
    value = ir.val(name, dtype, shape, const_value=data)
    graph.initializers.add(value)
    return value


def sizes_of(value: ir.Value) -> list[int]:
    """Return a weight's static shape."""
    assert value.shape is not None
    return [int(size) for size in value.shape.numpy()]
