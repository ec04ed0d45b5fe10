"""Rewrites layers to fewer nodes for a CPU, because a small model spends most of its time on per-node overhead.

ONNX Runtime merges nodes that have the same operator and the same inputs. So if all layers use identical nodes for
their masks and sizes, these are computed once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

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
    is_constant,
    made_by,
    replace,
)
from canvasrt.graphs.names import PAST

_END = 2**63 - 1  # the end of a Slice that runs to the end of its axis


def simplify_layers(model: ir.Model) -> bool:
    """Rewrite a body graph in place. Only rounding errors of results change.

    Return False if the graph has no layers.
    """
    graph = model.graph
    if not any(str(value.name).startswith(PAST) for value in graph.inputs):
        return False
    _share_lengths(graph)
    _share_phase(graph)
    _join_reshapes(graph)
    _skip_whole_slices(graph)
    _split_heads(graph)
    _fold_scales(graph)
    _fuse(model)
    _join_norms(graph)
    drop_unused(model)
    model.opset_imports.setdefault(CONTRIB, 1)
    graph.sort()
    return True


def _share_lengths(graph: ir.Graph) -> None:
    """If the caches of several layers have the same symbolic shape, let these layers read it from the first cache."""
    first: dict[tuple[str, ...], ir.Value] = {}
    for value in graph.inputs:
        if not str(value.name).startswith(PAST):
            continue
        assert value.shape is not None
        same = first.setdefault(tuple(map(str, value.shape)), value)
        for node in value.consumers():
            if node.op_type == "Shape":
                node.replace_input_with(0, same)


def _share_phase(graph: ir.Graph) -> None:
    """Expand the phase, `causal`, to one value per token. All layers share the expanded phase, with which each selects
    its encoder or decoder scalar."""
    for choice in graph_input(graph, "causal").consumers():
        if choice.op_type != "Where":
            continue
        chosen = choice.outputs[0]
        while [node.op_type for node in chosen.consumers()] != ["Mul"]:
            (node,) = chosen.consumers()
            phase = node.outputs[0]
            phase.replace_all_uses_with(chosen)
            node.replace_input_with(0, input_of(choice))
            choice.replace_input_with(0, phase)
            chosen.shape, phase.type = phase.shape, ir.TensorType(ir.DataType.BOOL)


def _join_reshapes(graph: ir.Graph) -> None:
    """Apply the second of two consecutive reshapes to the original value, so that the first is not needed."""
    for node in graph:
        while node.op_type == "Reshape" and (inner := made_by(node.inputs[0], "Reshape")):
            node.replace_input_with(0, input_of(inner))


def _skip_whole_slices(graph: ir.Graph) -> None:
    """Remove slices that keep the whole value."""
    for node in list(graph):
        bounds = _bounds(node)
        if bounds and bounds[:2] == (0, _END) and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(input_of(node))
            graph.remove(node, safe=True)


def _split_heads(graph: ir.Graph) -> None:
    """Replace the slices that separate queries, keys and values by a single Split node."""
    parts: dict[ir.Value, list[tuple[int, int, int, ir.Node]]] = {}
    for node in graph:
        bounds = _bounds(node)
        if bounds and made_by(node.inputs[0], "Transpose"):
            parts.setdefault(input_of(node), []).append((*bounds, node))
    for source, slices in parts.items():
        firsts, lasts, axes, nodes = zip(*sorted(slices, key=lambda each: each[0]), strict=True)
        heads = _heads(source)
        if heads is None or {*axes} != {1}:
            continue
        if [*firsts, heads] != [0, *lasts[:-1], min(heads, lasts[-1])]:
            continue
        sizes = integers(graph, f"{source.name}_sizes", np.diff([*firsts, heads]))
        names = [f"{source.name}_part_{number}" for number in range(len(nodes))]
        split = all_outputs(insert(nodes[0], "Split", [source, sizes], *names, axis=1))
        for node, output in zip(nodes, split, strict=True):
            replace(node.outputs[0], output)


def _bounds(node: ir.Node) -> tuple[int, int, int] | None:
    """Return where a Slice begins and ends, and its axis. Return None for other operators, for several axes, and for
    steps other than 1."""
    if node.op_type != "Slice" or len(node.inputs) < 4:
        return None
    found = [integers_of(value) for value in node.inputs[1:]]
    if any(each is None or len(each) != 1 for each in found) or found[3:] not in ([], [[1]]):
        return None
    first, last, axis = (each[0] for each in found[:3] if each is not None)
    return first, last, axis


def _heads(turned: ir.Value) -> int | None:
    """Return the number of heads of a value that a norm and a transpose compute from `[B, L, heads, size]`; None for
    any other value."""
    transpose = made_by(turned, "Transpose")
    norm = made_by(transpose.inputs[0], "RMSNormalization") if transpose else None
    reshape = made_by(norm.inputs[0], "Reshape") if norm else None
    shape = made_by(reshape.inputs[1], "Concat") if reshape else None
    heads = integers_of(shape.inputs[2]) if shape else None
    return heads[0] if heads else None


def _fold_scales(graph: ir.Graph) -> None:
    """If a product's input is multiplied by a scale, multiply the product's weight instead: ONNX Runtime does this only
    once, at load."""
    last = integers(graph, "last_axis", [-1])
    for node in reversed(list(graph)):
        if node.op_type != "Mul" or node.outputs[0].is_graph_output():
            continue
        x, scale = node.inputs
        assert x is not None
        rank = _rank(scale)
        products = node.outputs[0].consumers()
        if scale is None or rank not in (0, 1) or not products:
            continue
        if not all(_is_product_with_weight(each, node.outputs[0]) for each in products):
            continue
        for product in products:
            name = f"{node.outputs[0].name}_in_{product.name}"
            factor = scale
            if rank:  # one number for each input feature, that is, for each row of the weights
                factor = insert(product, "Unsqueeze", [scale, last], f"{name}_rows")
            weight = insert(product, "Mul", [product.inputs[1], factor], name)
            product.replace_input_with(0, x)
            product.replace_input_with(1, weight)
        graph.remove(node, safe=True)


def _is_product_with_weight(node: ir.Node, x: ir.Value) -> bool:
    return node.op_type == "MatMul" and node.inputs[0] is x and is_constant(input_of(node, 1))


def _rank(value: ir.Value | None) -> int | None:
    """Return the number of axes of a weight or a constant; None for any other value."""
    if value is None or not (value.is_initializer() or made_by(value, "Constant")):
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else len(tensor.shape)


def _fuse(model: ir.Model) -> None:
    """Replace each of three patterns of nodes by the single operator that ONNX Runtime has for it."""
    from onnxscript.rewriter import RewritePass
    from onnxscript.rewriter.pattern import RewriteRule

    RewritePass(
        [
            RewriteRule(_spelled_softmax, _softmax, remove_nodes=False),
            RewriteRule(_looked_up_rows, _looked_up_numbers, remove_nodes=False),
            RewriteRule(_turned_halves, _rotation, _is_rotation, remove_nodes=False),
        ]
    )(model)


def _spelled_softmax(op: Any, x: ir.Value) -> ir.Value:
    """Match a router's softmax over scores in descending order. The graph adds up the exponentials in two halves."""
    powers = op.Exp(op.Sub(x, op.Slice(x, _allow_other_inputs=True)))
    halves = [
        op.ReduceSum(op.Slice(powers, _allow_other_inputs=True), _allow_other_inputs=True)
        for _ in range(2)
    ]
    return op.Div(powers, op.Add(*halves))


def _softmax(op: Any, x: ir.Value) -> ir.Value:
    return op.Softmax(x, axis=-1)


def _looked_up_rows(
    op: Any, scale: ir.Value, index: ir.Value, axis: ir.Value, axes: ir.Value
) -> ir.Value:
    """Match a lookup of the scales of a token's experts in a table that has one scale per row."""
    return op.Squeeze(op.Gather(op.Unsqueeze(scale, axis), index), axes)


def _looked_up_numbers(op: Any, scale: ir.Value, index: ir.Value, **_: ir.Value) -> ir.Value:
    return op.Gather(scale, index, axis=0)


def _turned_halves(op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Match a rotation: `x · cos + [−second, first] · sin`."""
    second, first = (op.Slice(x, _allow_other_inputs=True) for _ in range(2))
    return op.Add(op.Mul(x, cos), op.Mul(op.Concat(op.Neg(second), first), sin))


def _is_rotation(context: Any, cos: ir.Value, sin: ir.Value, **_: ir.Value) -> bool:
    return _half_angles(cos, "Cos") is not None and _half_angles(sin, "Sin") is not None


def _rotation(op: Any, x: ir.Value, cos: ir.Value, **_: ir.Value) -> ir.Value:
    """Return the operator for a rotation. It takes each cosine and sine once, not once per half of the head."""
    angles = _half_angles(cos, "Cos")
    return op.RotaryEmbedding(x, op.Cos(angles), op.Sin(angles))


def _half_angles(turn: ir.Value, kind: str) -> ir.Value | None:
    """If `turn` is the cosine or sine (`kind`), possibly cast, of angles that are concatenated with themselves, return
    these angles `[B, L, head_dim / 2]`. Return None if `turn` is computed differently."""
    node = turn.producer()
    if node is not None and node.op_type == "Cast":
        node = input_of(node).producer()
    if node is None or node.op_type != kind:
        return None
    for each in ancestors(input_of(node)):
        if each.op_type == "Concat":
            first, second = each.inputs
            return first if first is second else None
    return None


def _join_norms(graph: ir.Graph) -> None:
    """Compute a sum and its norm in one node. All other nodes that read the sum read it from that node, too."""
    for node in list(graph):
        added = made_by(node.inputs[0], "Add") if node.op_type == "RMSNormalization" else None
        if added is None:
            continue
        total, names = added.outputs[0], (f"{node.name}_normed", "", "", f"{node.name}_total")
        normed = insert(
            node,
            "SkipSimplifiedLayerNormalization",
            [*added.inputs, node.inputs[1]],
            *names,
            domain=CONTRIB,
            epsilon=node.attributes["epsilon"].as_float(),
        )
        replace(node.outputs[0], normed)
        replace(total, all_outputs(normed)[3])
