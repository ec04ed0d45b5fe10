"""Products with INT4 matrices for a CPU: ONNX Runtime's MatMulNBits reads a graph's codes and scales as they are.

Its weight is `[out, in / block, block / 2]` bytes, two codes plus 8 per byte, the first one low: the bytes of the
lowered graph, cut into blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

# The function of a lowered graph that stands for an INT4 weight, and what its two inputs are called behind the name.
UNPACK, CODES, SCALES = "UnpackInt4", ".codes", ".scales"
_DOMAIN = "com.microsoft"
# How inputs are read. With few rows a product in int8 takes half the time; with a canvas's rows it gains nothing.
EXACT, INT8 = 0, 4


def use_nbits(model: ModelProto) -> bool:
    """Rewrite every product with an INT4 matrix `[out, in]`, in place; False where there is none."""
    graph = model.graph
    weights = {item.name: item for item in graph.initializer}
    unpacked = {
        node.output[0]: node
        for node in graph.node
        if node.op_type == UNPACK and len(weights[node.input[0]].dims) == 2
    }
    turned = {
        node.output[0]: node
        for node in graph.node
        if node.op_type == "Transpose" and node.input[0] in unpacked
    }
    products = [
        (place, node, unpacked[turned[node.input[1]].input[0]])
        for place, node in enumerate(graph.node)
        if node.op_type == "MatMul" and node.input[1] in turned
    ]
    for place, node, weight in products:
        codes, scales = (weights[name] for name in weight.input)
        block = cut(codes, scales)
        graph.node[place].CopyFrom(
            product(node.input[0], codes, scales, block, node.output[0], EXACT)
        )
    _drop(graph, [*unpacked.values(), *turned.values()])
    if products:
        import_domain(model)
    return bool(products)


def cut(codes: TensorProto, scales: TensorProto) -> int:
    """Make the bytes `[out, in / 2]` those of `[out, in / block, block / 2]`; the block's length."""
    out, width = codes.dims
    count = scales.dims[1]
    codes.dims[:] = [out, count, width // count]
    return 2 * width // count


def product(
    x: str, codes: TensorProto, scales: TensorProto, block: int, output: str, level: int
) -> NodeProto:
    """Return the node that multiplies `x` `[…, in]` with a matrix whose bytes are `cut`."""
    from onnx import helper

    out, count, _ = codes.dims
    sizes = {"K": count * block, "N": out, "block_size": block}
    return helper.make_node(
        "MatMulNBits",
        [x, codes.name, scales.name],
        [output],
        output + "_node",
        domain=_DOMAIN,
        bits=4,
        accuracy_level=level,
        **sizes,
    )


def import_domain(model: ModelProto) -> None:
    """Names the operator's domain in the model, once."""
    from onnx import helper

    if not any(opset.domain == _DOMAIN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))


def _drop(graph: GraphProto, nodes: list[NodeProto]) -> None:
    """Remove those of `nodes`, in their order in the graph, whose result nothing reads."""
    for node in reversed(nodes):
        if not any(node.output[0] in other.input for other in graph.node):
            graph.node.remove(node)
