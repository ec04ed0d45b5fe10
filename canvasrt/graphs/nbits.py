"""INT4 products on a CPU: ONNX Runtime's MatMulNBits reads a lowered graph's codes and scales as they are.

Its weight is `[out, in / block, block / 2]` bytes of two unsigned codes each, the first in the low bits: the lowered
graph's bytes, reshaped into blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from canvasrt.graphs.protos import CONTRIB, drop_unused, import_contrib, make_node

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

# The lowered graph's function that unpacks an INT4 weight, and the suffixes of its two inputs' names.
UNPACK, CODES, SCALES = "UnpackInt4", ".codes", ".scales"
# Accuracy levels. Inputs in int8 halve the time of a product with few rows, and gain nothing for a whole canvas.
ACCURACY_EXACT, ACCURACY_INT8 = 0, 4


def use_nbits(model: ModelProto) -> bool:
    """Rewrite every product with an INT4 matrix `[out, in]` in place. Return False if there is none."""
    graph = model.graph
    weights = {item.name: item for item in graph.initializer}
    unpacked = {
        each.output[0]: each
        for each in graph.node
        if each.op_type == UNPACK and len(weights[each.input[0]].dims) == 2
    }
    turned = {
        each.output[0]: each
        for each in graph.node
        if each.op_type == "Transpose" and each.input[0] in unpacked
    }
    products = [
        (place, each, unpacked[turned[each.input[1]].input[0]])
        for place, each in enumerate(graph.node)
        if each.op_type == "MatMul" and each.input[1] in turned
    ]
    for place, old, weight in products:
        codes, scales = (weights[name] for name in weight.input)
        block = cut_blocks(codes, scales)
        graph.node[place].CopyFrom(
            product(old.input[0], codes, scales, block, old.output[0], ACCURACY_EXACT)
        )
    if products:
        drop_unused(graph)
        import_contrib(model)
    return bool(products)


def cut_blocks(codes: TensorProto, scales: TensorProto) -> int:
    """Reshape the codes from `[out, in / 2]` to `[out, in / block, block / 2]`. Return the block's length."""
    out, width = codes.dims
    count = scales.dims[1]
    codes.dims[:] = [out, count, width // count]
    return 2 * width // count


def product(
    x: str, codes: TensorProto, scales: TensorProto, block: int, output: str, level: int
) -> NodeProto:
    """Return the node that multiplies `x` `[…, in]` by a matrix whose codes are in blocks, after `cut_blocks`."""
    out, count, _ = codes.dims
    sizes = {"K": count * block, "N": out, "block_size": block}
    return make_node(
        "MatMulNBits",
        [x, codes.name, scales.name],
        [output],
        output + "_node",
        domain=CONTRIB,
        bits=4,
        accuracy_level=level,
        **sizes,
    )
