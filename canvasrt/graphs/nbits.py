"""Computes INT4 products by ONNX Runtime's MatMulNBits, which reads a lowered graph's codes and scales unchanged.

MatMulNBits takes a weight as bytes `[out, in / block, block / 2]`, each of which has two unsigned codes, the first in
the low bits. These are the lowered graph's bytes, reshaped into blocks.
"""

from __future__ import annotations

import onnx_ir as ir

from canvasrt.graphs.edit import (
    CONTRIB,
    drop_unused,
    input_of,
    insert,
    made_by,
    part,
    replace,
    sizes_of,
)
from canvasrt.graphs.names import UNPACK

# MatMulNBits's accuracy levels. Rounding inputs to int8 halves a product's time if it has few rows, but does not help
# for a whole canvas.
ACCURACY_EXACT, ACCURACY_INT8 = 0, 4


def use_nbits(model: ir.Model) -> bool:
    """Rewrite every multiplication by an INT4 matrix `[out, in]` in place. Return False if there is none."""
    found = False
    for node in list(model.graph):
        transpose = made_by(node.inputs[1], "Transpose") if node.op_type == "MatMul" else None
        unpack = made_by(transpose.inputs[0], UNPACK) if transpose else None
        if unpack is None or len(sizes_of(input_of(unpack))) != 2:
            continue
        codes, scales = input_of(unpack), input_of(unpack, 1)
        blocks = part(model.graph, codes, f"{codes.name}.blocks", block_shape(codes, scales))
        name = str(codes.name)
        old = node.outputs[0]
        replace(old, product(node, input_of(node), blocks, scales, str(old.name), ACCURACY_EXACT))
        codes.name, blocks.name = f"{name}.flat", name
        found = True
    if found:
        drop_unused(model)
        model.opset_imports.setdefault(CONTRIB, 1)
    return found


def block_shape(codes: ir.Value, scales: ir.Value) -> list[int]:
    """Return the shape in blocks, `[out, in / block, block / 2]`, of a matrix's codes."""
    *_, out, width = sizes_of(codes)
    count = sizes_of(scales)[-1]
    return [out, count, width // count]


def product(
    before: ir.Node, x: ir.Value, codes: ir.Value, scales: ir.Value, name: str, level: int
) -> ir.Value:
    """Multiply `x` `[…, in]` by a matrix whose codes have the shape of `block_shape`."""
    out, count, width = sizes_of(codes)
    return insert(
        before,
        "MatMulNBits",
        [x, codes, scales],
        name,
        domain=CONTRIB,
        K=count * 2 * width,
        N=out,
        block_size=2 * width,
        bits=4,
        accuracy_level=level,
    )
