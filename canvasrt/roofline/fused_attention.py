"""Fused attention: both products and the softmax between them, in one kernel."""

from __future__ import annotations

from enum import IntEnum

from canvasrt.roofline.dims import Dim
from canvasrt.roofline.parse import Kernel, KernelTensor

_MARK = "mha"


class Operand(IntEnum):
    """The operands of attention, in the order of the graph's node."""

    QUERIES = 0
    KEYS = 1
    VALUES = 2
    MASK = 3


# The builder's orders of operands: `_SHARED` if heads share keys, `_OWN` if each head has its own keys. Shared keys are
# `[batch, heads, keys, width]`. Otherwise, keys are transposed, and batch and heads are one axis.
_SHARED = (Operand.KEYS, Operand.VALUES, Operand.QUERIES, Operand.MASK)
_OWN = (Operand.QUERIES, Operand.KEYS, Operand.MASK, Operand.VALUES)


def is_attention(kernel: Kernel) -> bool:
    """Return whether the kernel is fused attention."""
    return _MARK in kernel.name.split("_")


def operands(kernel: Kernel) -> dict[Operand, KernelTensor]:
    """Return the kernel's operands by their role; a mask may be missing.

    The builder's order depends on whether heads share keys.
    """
    shared = len(kernel.inputs[0].dims) > len(kernel.outputs[0].dims)
    order = [
        each
        for each in (_SHARED if shared else _OWN)
        if each is not Operand.MASK or len(kernel.inputs) > Operand.MASK
    ]
    return dict(zip(order, kernel.inputs, strict=False))


def keys_per_query(kernel: Kernel) -> Dim:
    """Return the number of keys per query."""
    keys = operands(kernel)[Operand.KEYS].dims
    return keys[-2] if len(keys) > len(kernel.outputs[0].dims) else keys[-1]
