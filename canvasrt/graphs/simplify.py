"""Layers for a CPU, in fewer nodes: there, much of a small model's time is what each node costs.

ONNX Runtime computes a value once if two nodes have the same kind and inputs. So it is enough that all layers ask the
same question: then their masks and sizes are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from canvasrt.graphs.protos import (
    CONTRIB,
    drop_unused,
    import_contrib,
    integers,
    integers_of,
    make_node,
    replace,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from onnx import GraphProto, ModelProto, NodeProto

Producers = dict[str, "NodeProto"]
_PAST = ("past_key_", "past_value_")
_END = 2**63 - 1  # where a Slice ends that runs to the end


def simplify_layers(model: ModelProto) -> bool:
    """Rewrite a body graph in place. Only the rounding of what it computes changes.

    Return False if the graph has no layers.
    """
    graph = model.graph
    if not any(each.name.startswith(_PAST) for each in graph.input):
        return False
    _share_lengths(graph)
    _share_phase(graph)
    _join_reshapes(graph)
    _skip_whole_slices(graph)
    _split_heads(graph)
    _fold_scales(graph)
    _fuse(graph, _softmax)
    _fuse(graph, _expert_scale)
    _fuse(graph, _rotation)
    _join_norms(graph)
    drop_unused(graph)
    import_contrib(model)
    return True


def _share_lengths(graph: GraphProto) -> None:
    """Ask one layer of each kind how long its past is: all pasts of a kind have the same length."""
    first: dict[tuple[str, ...], str] = {}
    same: dict[str, str] = {}
    for each in graph.input:
        if each.name.startswith(_PAST):
            sizes = tuple(dim.dim_param for dim in each.type.tensor_type.shape.dim)
            same[each.name] = first.setdefault(sizes, each.name)
    for node in graph.node:
        if node.op_type == "Shape" and node.input[0] in same:
            node.input[0] = same[node.input[0]]


def _share_phase(graph: GraphProto) -> None:
    """Give each token its phase before a layer chooses its scalar by it: choosing comes last, the rest is shared."""
    nodes: list[NodeProto] = []
    # By the value that was chosen from, in the shape it has by now.
    chosen: dict[str, NodeProto] = {}
    for node in graph.node:
        if node.op_type == "Where" and node.input[0] == "causal":
            chosen[node.output[0]] = node
        elif node.input and node.input[0] in chosen and node.op_type != "Mul":
            choice = chosen.pop(node.input[0])
            node.input[0] = choice.input[0]
            phase = f"{node.output[0]}_phase"
            chosen[node.output[0]] = make_node(
                "Where", [phase, *choice.input[1:]], [node.output[0]], choice.name
            )
            node.output[0] = phase
            nodes.append(node)
        else:
            nodes += [chosen.pop(each) for each in node.input if each in chosen]
            nodes.append(node)
    _put(graph, nodes)


def _join_reshapes(graph: GraphProto) -> None:
    """Reshape what was just reshaped from its first form, which leaves one node without use."""
    made = _producers(graph)
    for node in graph.node:
        while node.op_type == "Reshape" and _is(made, node.input[0], "Reshape"):
            node.input[0] = made[node.input[0]].input[0]


def _fuse(
    graph: GraphProto, fused: Callable[[Producers, NodeProto], list[NodeProto] | None]
) -> None:
    """Replace each node for which `fused` returns others, the last of which has its output."""
    made = _producers(graph)
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes += fused(made, node) or [node]
    _put(graph, nodes)


def _skip_whole_slices(graph: GraphProto) -> None:
    """Read past slices that leave everything."""
    held, kept = _held(graph), {each.name for each in graph.output}
    whole: dict[str, str] = {}
    for node in graph.node:
        for place, value in enumerate(node.input):
            node.input[place] = whole.get(value, value)
        bounds = _bounds(graph, node, held)
        if bounds is not None and bounds[:2] == (0, _END) and node.output[0] not in kept:
            whole[node.output[0]] = node.input[0]
    _put(graph, [node for node in graph.node if node.output[0] not in whole])


def _split_heads(graph: GraphProto) -> None:
    """Cut a projection into queries, keys and values by one node."""
    held, made = _held(graph), _producers(graph)
    parts: dict[str, list[tuple[int, int, int, NodeProto]]] = {}
    for node in graph.node:
        bounds = _bounds(graph, node, held)
        if bounds is not None and _is(made, node.input[0], "Transpose"):
            parts.setdefault(node.input[0], []).append((*bounds, node))
    for source, slices in parts.items():
        firsts, lasts, axes, nodes = zip(*sorted(slices, key=lambda each: each[0]), strict=True)
        heads = _heads(graph, made, source)
        if heads is None or {*axes} != {1}:
            continue
        if [*firsts, heads] != [0, *lasts[:-1], min(heads, lasts[-1])]:
            continue
        sizes = integers(np.diff([*firsts, heads]), f"{source}_sizes")
        graph.initializer.append(sizes)
        outputs = [each.output[0] for each in nodes]
        split = make_node("Split", [source, sizes.name], outputs, f"{source}_split", axis=1)
        replace(graph, made[source], [made[source], split])
        for each in nodes:
            graph.node.remove(each)


def _bounds(graph: GraphProto, node: NodeProto, held: set[str]) -> tuple[int, int, int] | None:
    """Return where a Slice begins and ends, and its axis; None for other nodes, several axes, and steps."""
    if node.op_type != "Slice" or len(node.input) < 4 or not held.issuperset(node.input[1:]):
        return None
    found = [integers_of(graph, each) for each in node.input[1:]]
    if any(len(each) != 1 for each in found) or found[3:] not in ([], [[1]]):
        return None
    return found[0][0], found[1][0], found[2][0]


def _heads(graph: GraphProto, made: Producers, turned: str) -> int | None:
    """Return how many heads a value has that comes from `[B, L, heads, size]` by a norm and a transpose."""
    normed = made[turned].input[0]
    if not (_is(made, normed, "RMSNormalization") and _is(made, made[normed].input[0], "Reshape")):
        return None
    shape = made[made[made[normed].input[0]].input[1]]
    return integers_of(graph, shape.input[2])[0] if shape.op_type == "Concat" else None


def _fold_scales(graph: GraphProto) -> None:
    """Scale a product's weights, which ONNX Runtime does once as it loads them, in place of its inputs."""
    held, kept = _held(graph), {each.name for each in graph.output}
    last = integers([-1], "last_axis")
    graph.initializer.append(last)
    nodes = list(graph.node)
    for node in list(reversed(nodes)):
        if node.op_type != "Mul" or node.input[1] not in held or node.output[0] in kept:
            continue
        products = [each for each in nodes if node.output[0] in each.input]
        axes = _axes(graph, node.input[1])
        if axes not in (0, 1) or not products:
            continue
        if not all(each.op_type == "MatMul" and each.input[1] in held for each in products):
            continue
        x, scale = node.input
        for product in products:
            name = f"{node.output[0]}_in_{product.name}"
            new = [make_node("Mul", [product.input[1], scale], [name], name)]
            if axes:  # a number for each input, so for each row of the weights
                rows = make_node("Unsqueeze", [scale, last.name], [f"{name}_rows"], f"{name}_rows")
                new[0].input[1] = rows.output[0]
                new.insert(0, rows)
            held.add(name)
            product.input[0], product.input[1] = x, name
            place = next(number for number, each in enumerate(nodes) if each is product)
            nodes[place:place] = new
        nodes = [each for each in nodes if each is not node]
    _put(graph, nodes)


def _axes(graph: GraphProto, value: str) -> int | None:
    """Return how many axes a weight or a constant has; None for what is computed."""
    for each in graph.initializer:
        if each.name == value:
            return len(each.dims)
    for node in graph.node:
        if value in node.output and node.op_type == "Constant":
            (held,) = node.attribute
            return len(held.t.dims) if held.name == "value" else int(held.name.endswith("s"))
    return None


def _held(graph: GraphProto) -> set[str]:
    """Return the values that do not depend on inputs: weights and constants, also if turned or cast."""
    held = {each.name for each in graph.initializer}
    for node in graph.node:
        if node.op_type in ("Constant", "Transpose", "Cast", "Reshape"):
            held |= set(node.output) if held.issuperset(node.input) else set()
    return held


def _expert_scale(made: Producers, node: NodeProto) -> list[NodeProto] | None:
    """Return one Gather for the scales of a token's experts, which are looked up as rows of one number."""
    if node.op_type != "Squeeze" or not _is(made, node.input[0], "Gather"):
        return None
    rows, index = made[node.input[0]].input
    if not _is(made, rows, "Unsqueeze"):
        return None
    return [make_node("Gather", [made[rows].input[0], index], list(node.output), node.name, axis=0)]


def _softmax(made: Producers, node: NodeProto) -> list[NodeProto] | None:
    """Return the softmax that a router spells out as `e / sum(e)`, e being `exp(x - first of x)`."""
    if node.op_type != "Div" or not _is(made, node.input[0], "Exp"):
        return None
    powers, total = node.input
    difference = made[made[powers].input[0]]
    if difference.op_type != "Sub":
        return None
    x, first = difference.input
    summed = _comes_from(made, total, powers, ("ReduceSum", "Add", "Slice"))
    if not (summed and _comes_from(made, first, x, ("Slice",))):
        return None
    return [make_node("Softmax", [x], list(node.output), node.name, axis=-1)]


def _rotation(made: Producers, node: NodeProto) -> list[NodeProto] | None:
    """Return one RotaryEmbedding for `x · cos + [−second, first] · sin`. It takes halves of cos and sin."""
    if node.op_type != "Add" or not all(_is(made, value, "Mul") for value in node.input):
        return None
    (x, cos), (turned, sin) = (made[value].input for value in node.input)
    cos, sin = _uncast(made, cos), _uncast(made, sin)
    if not (_is(made, cos, "Cos") and _is(made, sin, "Sin") and _is(made, turned, "Concat")):
        return None
    negative, first = made[turned].input
    if not (_is(made, negative, "Neg") and _comes_from(made, first, x, ("Slice",))):
        return None
    if not _comes_from(made, made[negative].input[0], x, ("Slice",)):
        return None
    angles = _half_angles(made, cos)
    turns = [f"{node.name}_{kind}" for kind in ("cos", "sin")]
    return [
        make_node("Cos", [angles], turns[:1], f"{turns[0]}_node"),
        make_node("Sin", [angles], turns[1:], f"{turns[1]}_node"),
        make_node("RotaryEmbedding", [x, *turns], list(node.output), node.name),
    ]


def _uncast(made: Producers, value: str) -> str:
    """Return what a cast to float32 reads, which is float32 already in a lowered graph's rotations."""
    return made[value].input[0] if _is(made, value, "Cast") else value


def _half_angles(made: Producers, turn: str) -> str:
    """Return the angles `[B, L, head_dim / 2]` that are doubled before their cosine is taken."""
    value = made[turn].input[0]
    while not _is(made, value, "Concat"):
        value = made[value].input[0]
    first, second = made[value].input
    assert first == second, "the two halves of a head turn by different angles"
    return first


def _join_norms(graph: GraphProto) -> None:
    """Compute a sum and its norm in one node. What reads the sum later, takes it from there."""
    made = _producers(graph)
    sums: dict[str, str] = {}
    nodes: list[NodeProto] = []
    for node in graph.node:
        for place, value in enumerate(node.input):
            node.input[place] = sums.get(value, value)
        if node.op_type == "RMSNormalization" and _is(made, node.input[0], "Add"):
            added = made[node.input[0]]
            sums[node.input[0]] = f"{node.input[0]}_normed"
            nodes.append(_skip_norm(node, list(added.input), sums[node.input[0]]))
        else:
            nodes.append(node)
    _put(graph, nodes)


def _skip_norm(norm: NodeProto, added: list[str], total: str) -> NodeProto:
    """Return ONNX Runtime's node for a norm of the sum of two values, which becomes its last output."""
    epsilon = next(each.f for each in norm.attribute if each.name == "epsilon")
    outputs = [norm.output[0], "", "", total]
    inputs = [*added, norm.input[1]]
    kind = "SkipSimplifiedLayerNormalization"
    return make_node(kind, inputs, outputs, norm.name, domain=CONTRIB, epsilon=epsilon)


def _comes_from(made: Producers, value: str, source: str, kinds: tuple[str, ...]) -> bool:
    """Return whether a value is computed from `source` by nodes of these kinds and constants alone."""
    if value == source:
        return True
    node = made.get(value)
    if node is None or node.op_type not in kinds:
        return False
    inputs = node.input if node.op_type == "Add" else node.input[:1]
    return all(_comes_from(made, each, source, kinds) for each in inputs)


def _producers(graph: GraphProto) -> Producers:
    return {value: node for node in graph.node for value in node.output}


def _is(made: Producers, value: str, kind: str) -> bool:
    return value in made and made[value].op_type == kind


def _put(graph: GraphProto, nodes: list[NodeProto]) -> None:
    del graph.node[:]
    graph.node.extend(nodes)
