"""Rewrites the sampler for a CPU, so that it sweeps over the vocabulary fewer times.

The exported form computes unnormalised probabilities, because they suit 16 bits. In float32, normalised probabilities
need no separate sums, and ONNX Runtime's LogSoftmax processes rows in the CPU's cache. Softcap and temperature become
one factor of the hidden states and one factor after the tanh.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from canvasrt.graphs.edit import drop_unused, input_of, insert, made_by, replace, user
from canvasrt.graphs.names import DOMAIN

# The exported sampler's nodes, listed backwards: from the probabilities to the product with the embedding table.
_CHAIN = ("Exp", "Sub", "Div", "Mul", "Tanh", "Div")


def shorten_sampler(model: ir.Model) -> bool:
    """Rewrite a head graph in place. Only rounding errors of results change.

    Return False for graphs without a sampler, and for graphs that quantize probabilities, because quantized
    probabilities must stay unnormalised.
    """
    graph = model.graph
    chain = _chain(graph)
    if chain is None:
        return False
    exp, shift, cooled, _, tanh, shrunk = chain
    norm = _norm(graph)
    assert norm is not None
    total = user(exp.outputs[0], "ReduceSum").outputs[0]
    log, share, rows = (user(total, kind) for kind in ("Log", "Div", "Unsqueeze"))
    entropy = user(log.outputs[0], "Sub")
    divided = user(rows.outputs[0], "Div")

    # tanh(x / cap) · cap / temperature = tanh(product of (state / cap)) · (cap / temperature)
    normed, cap = norm.outputs[0], input_of(shrunk, 1)
    readers = list(normed.uses())
    states = insert(shrunk, "Div", [normed, cap], f"{normed.name}_shrunk")
    for reader, place in readers:
        reader.replace_input_with(place, states)
    tanh.replace_input_with(0, input_of(shrunk))
    factor = insert(cooled, "Div", [cap, input_of(cooled, 1)], f"{cooled.name}_factor")
    logits = insert(cooled, "Mul", [tanh.outputs[0], factor], f"{cooled.name}_logits")
    # Log-probabilities replace logits minus their maximum, so probabilities sum to 1.
    normalised = insert(shift, "LogSoftmax", [logits], f"{shift.name}_normalised", axis=-1)
    replace(shift.outputs[0], normalised)
    replace(
        entropy.outputs[0], insert(entropy, "Neg", [input_of(share)], f"{entropy.name}_negative")
    )
    divided.outputs[0].replace_all_uses_with(input_of(divided))
    drop_unused(model)
    graph.sort()
    return True


def _norm(graph: ir.Graph) -> ir.Node | None:
    """Return the norm if it is the only reader of the hidden states; None otherwise."""
    readers = [node for each in graph.inputs if each.name == "hidden" for node in each.consumers()]
    return readers[0] if [each.op_type for each in readers] == ["RMSNormalization"] else None


def _chain(graph: ir.Graph) -> list[ir.Node] | None:
    """Return the nodes that match `_CHAIN`; None if the graph has no such nodes or quantizes the products'
    inputs."""
    exps = [node for node in graph if node.op_type == "Exp"]
    norm = _norm(graph)
    if len(exps) != 1 or norm is None:
        return None
    # In a quantized graph, a node of this domain rounds each product's input.
    both = (exps[0].outputs[0], norm.outputs[0])
    if any(node.domain == DOMAIN for value in both for node in _readers(value)):
        return None
    chain = exps
    for kind in _CHAIN[1:]:
        source = made_by(chain[-1].inputs[0], kind)
        if source is None:
            return None
        chain.append(source)
    return chain


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes that read a value, directly or after a cast."""
    for node in value.consumers():
        if node.op_type == "Cast":
            yield from _readers(node.outputs[0])
        else:
            yield node
