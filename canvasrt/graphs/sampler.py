"""A CPU's sampler, in fewer passes over the vocabulary, each of which reads or writes a number for every token.

The exported form keeps unnormalised probabilities, which suits 16 bits. In float32, normalised ones need no sums of
their own, and ONNX Runtime's LogSoftmax works row by row in the cache. The softcap and the temperature become one factor
before the tanh, on hidden states, and one after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from canvasrt.graphs.experts import DOMAIN
from canvasrt.graphs.protos import drop_unused, make_node, users

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

# What the exported sampler consists of, from the products with the table to the probabilities.
_CHAIN = ("Exp", "Sub", "Div", "Mul", "Tanh", "Div")


def shorten_sampler(model: ModelProto) -> bool:
    """Rewrite a head graph in place. Only the rounding of what it computes changes.

    Return False for graphs without a sampler, and for those that round probabilities to a format that has room for
    unnormalised ones.
    """
    graph = model.graph
    made = {value: node for node in graph.node for value in node.output}
    chain = _chain(graph, made)
    if chain is None:
        return False
    exp, shift, cooled, _, tanh, shrunk = chain
    (norm,) = users(graph, "hidden")
    total = _user(graph, exp.output[0], "ReduceSum")
    log, share, rows = (_user(graph, total.output[0], kind) for kind in ("Log", "Div", "Unsqueeze"))
    entropy = _user(graph, log.output[0], "Sub")
    divided = _user(graph, rows.output[0], "Div")

    # tanh(x / cap) · cap / temperature = tanh(product of (state / cap)) · (cap / temperature)
    states, cap, factor = f"{norm.output[0]}_shrunk", shrunk.input[1], f"{cooled.name}_factor"
    _redirect(graph, norm.output[0], states)
    _redirect(graph, shrunk.output[0], shrunk.input[0])
    _redirect(graph, divided.output[0], divided.input[0])
    new = {
        norm.output[0]: [norm, make_node("Div", [norm.output[0], cap], [states], states)],
        cooled.output[0]: [
            make_node("Div", [cap, cooled.input[1]], [factor], factor),
            make_node("Mul", [tanh.output[0], factor], list(cooled.output), cooled.name),
        ],
        # Log-probabilities take the place of what was only shifted, so all probabilities sum to 1.
        shift.output[0]: [
            make_node("LogSoftmax", [cooled.output[0]], list(shift.output), shift.name, axis=-1)
        ],
        entropy.output[0]: [make_node("Neg", [share.input[0]], list(entropy.output), entropy.name)],
    }
    nodes = [made[cap]] if cap in made else []  # a constant, which the exporter may write later
    for node in graph.node:
        nodes += new.get(node.output[0], [node] if node.output[0] != cap else [])
    del graph.node[:]
    graph.node.extend(nodes)
    drop_unused(graph)
    return True


def _chain(graph: GraphProto, made: dict[str, NodeProto]) -> list[NodeProto] | None:
    """Return the nodes of `_CHAIN`, or None if there are others."""
    exps = [each for each in graph.node if each.op_type == "Exp"]
    if len(exps) != 1:
        return None
    norms = users(graph, "hidden")
    if [each.op_type for each in norms] != ["RMSNormalization"]:
        return None
    # Quantized products round what they multiply.
    both = (exps[0].output[0], norms[0].output[0])
    if any(each.domain == DOMAIN for value in both for each in _readers(graph, value)):
        return None
    chain = exps
    while len(chain) < len(_CHAIN):
        source = made.get(chain[-1].input[0])
        if source is None or source.op_type != _CHAIN[len(chain)]:
            return None
        chain.append(source)
    return chain


def _redirect(graph: GraphProto, value: str, other: str) -> None:
    """Have all that read a value read another."""
    for node in users(graph, value):
        for place, each in enumerate(node.input):
            node.input[place] = other if each == value else each


def _readers(graph: GraphProto, value: str) -> list[NodeProto]:
    """Return the nodes that read a value, also if it was cast."""
    found = []
    for each in users(graph, value):
        found += _readers(graph, each.output[0]) if each.op_type == "Cast" else [each]
    return found


def _user(graph: GraphProto, value: str, kind: str) -> NodeProto:
    """Return the one node of a kind that reads a value itself."""
    (found,) = (each for each in users(graph, value) if each.op_type == kind)
    return found
