"""The bytes and operations of a kernel whose sizes are known. These are pure functions over the kernel list.

Bytes: each byte that a kernel reads or writes counts once, as if nothing stayed in caches between kernels. For gathers
and slices, only the elements that they read count. Operations: a product counts two per multiply-add. Every other
kernel counts one per element for each step in its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from canvasrt.errors import CanvasError
from canvasrt.formats import ALL_CODES
from canvasrt.roofline.dims import UNKNOWN, evaluate, volume
from canvasrt.roofline.fused_attention import Operand, is_attention, keys_per_query, operands
from canvasrt.roofline.parse import Kernel, KernelTensor

DimSizes = Mapping[str, int]

# Bits per element, by the builder's name of a dtype.
BITS = {each.builder: each.bits for each in ALL_CODES.values()} | {
    "UInt8": 8,
    "Bool": 8,
    "BFloat16": 16,
    "Half": 16,
    "Float": 32,
    "Int32": 32,
    "Int64": 64,
}
# dtype of operands → format in which their product runs. If the dtypes differ, the wider dtype counts, because the
# other operand is converted first.
_FORMATS = {each.builder: each.rates[0] for each in ALL_CODES.values() if each.rates} | {
    "BFloat16": "bf16",
    "Half": "bf16",
    "Float": "fp32",
}
# Format → a substring of the names of the tensor-core instructions that multiply it. Instructions with no such
# substring multiply 16-bit numbers.
_INSTRUCTIONS = {"fp4": "mxf4nvf4", "fp8": ".e4m3."}
# Kinds of our own kernels, which run between engines: they sort rows by expert, quantize rows, or multiply sorted rows.
# A sorted product's `tactic` is its tensor-core instruction.
ROW_SORT, ROW_ROUNDING, SORTED_PRODUCT = "row sort", "row rounding", "sorted product"
# Myelin, TensorRT's compiler, names fused kernels by their steps, such as `MulMeanAddSqrt`. `Fc` is a product.
_STEPS = re.compile(r"[A-Z][a-z]+")
_PRODUCT = re.compile(r"Fc|Gemm|Matm")
# Kinds that do not run on the GPU: shape arithmetic and memory bookkeeping.
_HOST = ("shape_call", "allocate", "deallocate")


@dataclass(frozen=True)
class Cost:
    """Bytes moved, and operations in `format`, a key of a GPU's rates. `is_product`: whether the kernel is a matrix
    product or attention."""

    moved: float
    operations: float
    format: str
    is_product: bool


def launches(kernel: Kernel) -> bool:
    """Return whether the kernel launches work on the GPU."""
    return kernel.kind not in _HOST


def is_own(kernel: Kernel) -> bool:
    """Return whether the kernel is canvasrt's, not the builder's."""
    return kernel.kind in (ROW_SORT, ROW_ROUNDING, SORTED_PRODUCT)


def is_product(kernel: Kernel) -> bool:
    """Return whether the kernel is a matrix product, either alone or fused with later steps, but not attention."""
    if is_attention(kernel):
        return False
    return kernel.kind in ("gemm", SORTED_PRODUCT) or bool(_PRODUCT.search(step_names(kernel)))


def step_names(kernel: Kernel) -> str:
    """Return the steps that a fused kernel's name lists, such as `MulMeanAddSqrt`; empty for other kernels."""
    found = re.match(r"__myl_([A-Za-z]+)_", f"{kernel.tactic or kernel.name}_")
    return found[1] if found else ""


def weight(kernel: Kernel) -> KernelTensor | None:
    """Return the constant matrix of a product; None if both operands are computed."""
    matrices = [
        each
        for each in kernel.constants
        if sum(isinstance(d, int) and d > 1 for d in each.dims) >= 2
    ]
    return max(matrices, key=lambda each: volume(each.dims, {}), default=None)


def costs(kernels: Sequence[Kernel], sizes: DimSizes) -> list[Cost]:
    """Return the costs of a program's kernels at these sizes.

    Raises CanvasError for a size that is unknown or missing from `sizes`.
    """
    try:
        whole = _whole(kernels, sizes)
        return [_cost(kernel, sizes, whole) for kernel in kernels]
    except KeyError as error:
        raise CanvasError(
            f"the kernel list has a size that is unknown: {error.args[0]!r}",
            "build the engines again with this version",
        ) from None


def _whole(kernels: Iterable[Kernel], sizes: DimSizes) -> dict[str, int]:
    """Return every tensor's number of elements, by name. This is the largest number in any kernel, because some kernels
    list only a part of a tensor."""
    whole: dict[str, int] = {}
    for kernel in kernels:
        for tensor in kernel.tensors:
            count = volume(tensor.dims, sizes)
            whole[tensor.name] = max(whole.get(tensor.name, 0), count)
    return whole


def _cost(kernel: Kernel, sizes: DimSizes, whole: Mapping[str, int]) -> Cost:
    moved = _moved(kernel, sizes, whole)
    if is_attention(kernel):
        asked = operands(kernel)[Operand.QUERIES]
        # Two products: the scores, and the scores times the values.
        operations = 4.0 * volume(asked.dims, sizes) * evaluate(keys_per_query(kernel), sizes)
        return Cost(moved, operations, _FORMATS[asked.dtype], True)
    if kernel.kind == SORTED_PRODUCT:
        matrix = weight(kernel)
        assert matrix is not None
        # All rows of a block, including empty ones, are multiplied by the matrix of the block's expert.
        rows = evaluate(kernel.inputs[0].dims[0], sizes)
        operations = 2.0 * rows * volume(matrix.dims[1:], sizes)
        return Cost(moved, operations, product_format(kernel), True)
    if is_product(kernel):
        inner = evaluate(kernel.inputs[0].dims[-1], sizes)
        operations = 2.0 * inner * max(volume(each.dims, sizes) for each in kernel.outputs)
        return Cost(moved, operations, product_format(kernel), True)
    steps = len(_STEPS.findall(step_names(kernel)))
    elements = max((_taken(each, sizes) for each in kernel.tensors), default=0)
    return Cost(moved, float(steps * elements), "fp32", False)


def product_format(kernel: Kernel) -> str:
    """Return the format in which a product runs. For a sorted product, its instruction says the format. Otherwise, it is
    the wider operand's format, or bf16 if narrower operands are cast first."""
    if kernel.kind == SORTED_PRODUCT:
        return next((name for name, part in _INSTRUCTIONS.items() if part in kernel.tactic), "bf16")
    operands = [kernel.inputs[0]]
    if (constant := weight(kernel)) is not None:
        operands.append(constant)
    elif len(kernel.inputs) > 1:
        operands.append(kernel.inputs[1])
    widest = max(operands, key=lambda each: BITS[each.dtype])
    # `CastMulCastFc` dequantizes its operands before the product.
    before, product, _ = step_names(kernel).partition("Fc")
    cast = bool(product) and "Cast" in before
    return "bf16" if cast and BITS[widest.dtype] < 16 else _FORMATS[widest.dtype]


def _moved(kernel: Kernel, sizes: DimSizes, whole: Mapping[str, int]) -> float:
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
            # A scatter writes only its updates, which are its largest input besides the tensor that it changes.
            given = [volume(each.dims, sizes) for each in kernel.inputs if each.name != name]
            total += min(whole[name], max(given, default=whole[name])) * bits
        else:
            total += min(count, whole[name]) * bits
    return total / 8


def _taken(tensor: KernelTensor, sizes: DimSizes) -> int:
    count = volume(tensor.dims, sizes)
    if tensor.read is None or tensor.read == UNKNOWN:
        return count
    return min(count, evaluate(tensor.read, sizes))
