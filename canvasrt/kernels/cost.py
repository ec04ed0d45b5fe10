"""What a kernel must move and compute at given sizes. Pure functions over the kernel list.

Bytes are what a kernel reads and writes of memory, each byte once: caches between kernels are not counted on. A gather
or a slice counts the elements that it takes. Operations of a product are two for each multiply-add; those of
everything else one for each step that its name tells and each element.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from canvasrt.errors import CanvasError
from canvasrt.kernels.dims import UNKNOWN, evaluate, volume
from canvasrt.kernels.parse import Kernel, Tensor

Sizes = Mapping[str, int]

BITS = {
    "FP4E2M1": 4,
    "Int4": 4,
    "FP8": 8,
    "Int8": 8,
    "UInt8": 8,
    "Bool": 8,
    "BFloat16": 16,
    "Half": 16,
    "Float": 32,
    "Int32": 32,
    "Int64": 64,
}
# The format of a product by its narrower operand; weights narrower than what they are multiplied with are widened first.
_FORMATS = {
    "FP4E2M1": "fp4",
    "FP8": "fp8",
    "Int8": "int8",
    "BFloat16": "bf16",
    "Half": "bf16",
    "Float": "fp32",
}
_ATTENTION = "mha"
# Myelin's names are of four letters a step: `MulMeanAddSqrt`; `Fc` is a product.
_STEPS = re.compile(r"[A-Z][a-z]+")
_PRODUCT = re.compile(r"Fc|Gemm|Matm")
# What launches nothing on the GPU: shapes computed, and memory taken from the program's own piece.
_HOST = ("shape_call", "allocate", "deallocate")


@dataclass(frozen=True)
class Cost:
    """`moved` bytes; `operations` in `format`, a key of a GPU's rates; whether it is a matrix product or attention."""

    moved: float
    operations: float
    format: str
    is_product: bool


def launches(kernel: Kernel) -> bool:
    """Return whether the GPU runs something for it."""
    return kernel.kind not in _HOST


def is_attention(kernel: Kernel) -> bool:
    """Return whether it is attention in one kernel: both products and the softmax between them."""
    return _ATTENTION in kernel.name.split("_")


def is_product(kernel: Kernel) -> bool:
    """Return whether it is a product of two matrices, alone or with what follows it."""
    if is_attention(kernel):
        return False
    return kernel.kind == "gemm" or bool(_PRODUCT.search(step_names(kernel)))


def step_names(kernel: Kernel) -> str:
    """Return what Myelin says that a fused kernel computes, step by step; empty for others."""
    found = re.match(r"__myl_([A-Za-z]+)_", f"{kernel.tactic or kernel.name}_")
    return found[1] if found else ""


def weight(kernel: Kernel) -> Tensor | None:
    """Return the constant matrix of a product; None where both operands are computed."""
    matrices = [each for each in kernel.constants if sum(_is_long(d) for d in each.dims) >= 2]
    return max(matrices, key=lambda each: volume(each.dims, {}), default=None)


def _is_long(dim: int | str) -> bool:
    return isinstance(dim, int) and dim > 1


def costs(kernels: Sequence[Kernel], sizes: Sizes) -> list[Cost]:
    """Return the cost of each kernel of a program at these sizes.

    Raises CanvasError for a kernel with a size that is not known, or that `sizes` does not have.
    """
    try:
        whole = _whole(kernels, sizes)
        return [_cost(kernel, sizes, whole) for kernel in kernels]
    except KeyError as error:
        raise CanvasError(
            f"the size {error.args[0]!r} of a kernel's tensor is not known",
            "this list of kernels cannot be evaluated: build the engines again",
        ) from None


def _whole(kernels: Iterable[Kernel], sizes: Sizes) -> dict[str, int]:
    """Return the elements of every tensor: kernels may be shown a part of it."""
    whole: dict[str, int] = {}
    for kernel in kernels:
        for tensor in kernel.tensors:
            count = volume(tensor.dims, sizes)
            whole[tensor.name] = max(whole.get(tensor.name, 0), count)
    return whole


def _cost(kernel: Kernel, sizes: Sizes, whole: Mapping[str, int]) -> Cost:
    moved = _moved(kernel, sizes, whole)
    if is_attention(kernel):
        key, _, query = kernel.inputs[:3]
        # Scores, and their product with the values.
        operations = 4.0 * volume(query.dims, sizes) * evaluate(key.dims[-2], sizes)
        return Cost(moved, operations, _FORMATS[query.dtype], True)
    if is_product(kernel):
        inner = evaluate(kernel.inputs[0].dims[-1], sizes)
        operations = 2.0 * inner * max(volume(each.dims, sizes) for each in kernel.outputs)
        return Cost(moved, operations, product_format(kernel), True)
    steps = len(_STEPS.findall(step_names(kernel)))
    elements = max((_taken(each, sizes) for each in kernel.tensors), default=0)
    return Cost(moved, float(steps * elements), "fp32", False)


def product_format(kernel: Kernel) -> str:
    """Return the format that a product is computed in: that of its wider operand, 16 bits where operands are cast first."""
    operands = [kernel.inputs[0]]
    if (constant := weight(kernel)) is not None:
        operands.append(constant)
    elif len(kernel.inputs) > 1:
        operands.append(kernel.inputs[1])
    widest = max(operands, key=lambda each: BITS[each.dtype])
    # `CastMulCastFc`: numbers are dequantized on their way into the product.
    before, product, _ = step_names(kernel).partition("Fc")
    cast = bool(product) and "Cast" in before
    return "bf16" if cast and BITS[widest.dtype] < 16 else _FORMATS[widest.dtype]


def _moved(kernel: Kernel, sizes: Sizes, whole: Mapping[str, int]) -> float:
    read: dict[str, tuple[float, int]] = {}
    for tensor in (*kernel.inputs, *kernel.constants):
        count, bits = read.get(tensor.name, (0, BITS[tensor.dtype]))
        read[tensor.name] = (count + _taken(tensor, sizes), bits)
    written = {
        each.name: (volume(each.dims, sizes), BITS[each.dtype])
        for each in kernel.outputs
        if each.name not in read
    }
    in_place = {each.name for each in kernel.outputs} & set(read)
    total = float(sum(count * bits for count, bits in written.values()))
    for name, (count, bits) in read.items():
        if name in in_place:
            # A scatter writes as many elements as it is given, and leaves the others.
            given = [volume(each.dims, sizes) for each in kernel.inputs if each.name != name]
            total += min(whole[name], max(given, default=whole[name])) * bits
        else:
            total += min(count, whole[name]) * bits
    return total / 8


def _taken(tensor: Tensor, sizes: Sizes) -> int:
    count = volume(tensor.dims, sizes)
    if tensor.read is None or tensor.read == UNKNOWN:
        return count
    return min(count, evaluate(tensor.read, sizes))
