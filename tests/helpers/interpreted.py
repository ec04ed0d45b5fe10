"""Runs the kernels over sorted rows in Triton's interpreter, on a fake device with host memory."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs canvasrt[sorted]")
with pytest.MonkeyPatch.context() as _patch:
    # Kernels imported in this block are interpreted, while processes that tests start still compile kernels. Triton is
    # imported anew, since torch may have imported it before.
    _patch.setenv("TRITON_INTERPRET", "1")
    for _name in [each for each in sys.modules if each.partition(".")[0] == "triton"]:
        if not _name.startswith("triton._C"):
            del sys.modules[_name]
    import triton
    import triton.experimental.gluon  # the interpreter would import it at its first run
    from triton.runtime import interpreter

    from canvasrt.sorted_rows import triton_kernels

from canvasrt.formats import E2M1, E4M3
from canvasrt.graphs import lowbits
from canvasrt.runtime.engine import KernelCall
from canvasrt.sorted_rows.ahead import CompiledKernel, argument_types, constants
from canvasrt.sorted_rows.description import ExpertSizes, KernelForm
from tests.helpers.fake_tensorrt import FakeCudaDevice

_DTYPES = {
    "*i32": torch.int32,
    "*i64": torch.int64,
    "*u8": torch.uint8,
    "*fp32": torch.float32,
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
    "*fp8e4nv": torch.float8_e4m3fn,
}


# The interpreter represents these dtypes by their bits. It truncates where a GPU rounds, and multiplies bfloat16 bits
# as integers, so these operations are replaced.
_NARROW = {
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp16": np.float16,
    "fp32": np.float32,
}
_Handle, _Builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
_operate = _Builder.binary_op


def _convert(bits: np.ndarray, source: Any, to: Any, rounding: Any) -> np.ndarray:
    """Convert with rounding to nearest, ties to even, as a GPU does."""
    numbers = np.ascontiguousarray(bits).view(_NARROW[source.name]).astype(np.float32)
    return numbers.astype(_NARROW[to.name]).view(f"uint{to.primitive_bitwidth}")


def _widen(handle: Any) -> np.ndarray:
    return (
        np.ascontiguousarray(handle.data).view(_NARROW[handle.dtype.scalar.name]).astype(np.float32)
    )


def _dot(self: Any, a: Any, b: Any, total: Any, precision: Any, imprecise: Any) -> Any:
    """Compute exact products and sum them in float32, as tensor cores do."""
    return _Handle(_widen(a) @ _widen(b) + total.data, total.dtype.scalar)


def _dot_scaled(self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, fast: Any, *packed: Any) -> Any:  # fmt: skip
    """Multiply matrices of E2M1 codes, `[M, K / 2]` and `[K / 2, N]`, packed along K, with scales `[M, K / 16]` and
    `[N, K / 16]`."""
    *along_inner, total = packed
    assert all(along_inner)
    assert {str(each).rpartition(".")[2] for each in (a_format, b_format)} == {"E2M1"}
    left, right = (
        lowbits.scaled(
            lowbits.numbers_of(E2M1, np.ascontiguousarray(codes)),
            None,
            np.ascontiguousarray(scale.data).view(np.uint8),
            E4M3,
        )
        for codes, scale in ((a.data, a_scale), (b.data.T, b_scale))
    )
    return _Handle(left @ right.T + total.data, total.dtype.scalar)


def _binary(self: Any, a: Any, b: Any, operation: Any) -> Any:
    if a.dtype.scalar.name != "bf16" or operation not in (np.add, np.subtract, np.multiply):
        return _operate(self, a, b, operation)
    found = operation(_widen(a), _widen(b)).astype(ml_dtypes.bfloat16)
    return _Handle(found.view(np.uint16), a.dtype.scalar)


def _constant(self: Any, value: float) -> Any:
    bits = np.array([value], ml_dtypes.bfloat16).view(np.uint16)
    return _Handle(bits, triton.language.bfloat16)


def _patch_for_good(function: Any) -> Any:
    """Patch Triton's modules for the interpreter only once, since patching takes nearly half the time of a run."""
    module = function.__globals__["__name__"]
    if module not in _patched:
        _patched[module] = _patch_modules(function)
    return SimpleNamespace(restore=lambda: None)


_patched: dict[str, Any] = {}
_patch_modules = interpreter._patch_lang
interpreter._patch_lang = _patch_for_good
interpreter._convert_float = _convert
_Builder.get_bf16 = _constant
_Builder.create_dot = _dot
_Builder.binary_op = _binary
_Builder.create_dot_scaled = _dot_scaled


def interpret(
    form: KernelForm,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    capability: tuple[int, int] = (8, 9),
) -> None:
    """Run a kernel with tensors, or with addresses and numbers, in the order of its parameters."""
    given = [
        _at(each, kind) if kind.startswith("*") and isinstance(each, int) else each
        for each, kind in zip(arguments, argument_types(form).values(), strict=True)
    ]
    names = dict(zip(argument_types(form), given, strict=True))
    getattr(triton_kernels, form.function)[grid](**names, **constants(form, capability))


def _at(address: int, kind: str) -> torch.Tensor:
    """Return a tensor that begins at an address. Kernels use only its address and dtype."""
    memory = (ctypes.c_uint8 * 16).from_address(address)
    return torch.frombuffer(memory, dtype=_DTYPES[kind])


class SortingDevice(FakeCudaDevice):
    """A fake device whose kernel images only name a kernel, which is then interpreted."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[KernelForm] = []
        self.kernels_run = 0

    def load_kernel(self, image: bytes, entry: str, shared: int) -> int:
        data = json.loads(image)
        form = KernelForm(**data | {"sizes": ExpertSizes(**data["sizes"])})
        assert form.function == entry
        self.forms.append(form)
        return len(self.forms) - 1

    def run_kernel(self, call: KernelCall) -> None:
        form = self.forms[call.kernel]
        *arguments, scratch, profile = (each.value or 0 for each in call.arguments)
        assert (scratch, profile) == (0, 0)
        self.kernels_run += 1
        self.queue(lambda: interpret(form, call.grid, arguments, self.capability))


def named_kernel(form: KernelForm, capability: tuple[int, int]) -> CompiledKernel:
    """Return an image for the fake device that names a kernel."""
    return CompiledKernel(json.dumps(asdict(form)).encode(), form.function, 0, 128, "")
