"""Compiles the kernels ahead of time, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from canvasrt.cache import cache_folder
from canvasrt.errors import CanvasError
from canvasrt.extras import require
from canvasrt.pass_shapes import BLOCK_ROWS
from canvasrt.sorted_rows.description import (
    DOWN_KERNEL,
    FORMS,
    PROGRAM_OUTPUTS,
    ROUND,
    ROUNDED,
    SORT,
    KernelForm,
    inputs_per_step,
)

# Triton's names of dtypes.
_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "uint8": "u8",
}
# Compute capabilities on which Triton multiplies blocks of 16 rows in NVFP4 on tensor cores. On all others, codes are
# converted to float16, which is exact.
_NATIVE_NVFP4 = ((12, 0),)
# How many tokens the sort processes at a time.
_CHUNK = 256
_WARPS, _STAGES = 4, 3


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel for one compute capability: its image, entry name, size of shared memory in bytes, threads per program,
    and PTX."""

    image: bytes
    entry: str
    shared: int
    threads: int
    ptx: str


def compile_kernel(form: KernelForm, capability: tuple[int, int]) -> CompiledKernel:
    """Compile one kernel. Raises CanvasError if the Triton language is not installed."""
    triton = require("triton", "sorted")
    compiler, backends = (
        require("triton.compiler", "sorted"),
        require("triton.backends.compiler", "sorted"),
    )
    from canvasrt.sorted_rows import triton_kernels

    function = getattr(triton_kernels, form.function)
    names, types = list(function.arg_names), argument_types(form)
    fixed = constants(form, capability)
    source = compiler.ASTSource(
        function,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in fixed.items()},
        # Declares addresses as aligned, so that kernels can read 16 bytes at a time.
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind.startswith("*")
        },
    )
    major, minor = capability
    target = backends.GPUTarget("cuda", 10 * major + minor, 32)
    # The product with unquantized down weights gets one more pipeline stage, because with `_STAGES` stages, it spills a
    # register on compute capabilities 8.6 and 8.9.
    more = form.function == DOWN_KERNEL and form.format is None
    options = {"num_warps": _WARPS, "num_stages": _STAGES + more}
    with triton.knobs.compilation.scope(), triton.knobs.cache.scope():
        # Line information would contain this machine's paths.
        triton.knobs.compilation.disable_line_info = True
        triton.knobs.cache.dir = str(cache_folder() / "triton")
        made = triton.compile(source, target=target, options=options)
    # The parameters must be the arguments and two addresses of scratch memory; see `kernel_arguments`. If there were
    # more, a launch would read past the arguments.
    count = made.asm["ptx"].partition(".entry")[2].partition(")")[0].count(".param")
    if count != len(types) + 2 or made.metadata.global_scratch_size:
        raise CanvasError(
            f"triton {triton.__version__} compiles kernels with {count} parameters, not {len(types) + 2}",
            "install the version in constraints.txt: pip install -c constraints.txt triton",
        )
    return CompiledKernel(
        made.asm["cubin"],
        made.metadata.name,
        made.metadata.shared,
        32 * made.metadata.num_warps,
        made.asm["ptx"],
    )


def constants(form: KernelForm, capability: tuple[int, int]) -> dict[str, int]:
    """Return a kernel's compile-time constants by parameter."""
    sizes = form.sizes
    if form.function == ROUND:
        return {"D": sizes.size, "BLOCK": BLOCK_ROWS, "OUT": PROGRAM_OUTPUTS}
    if form.function == SORT:
        return {"K": sizes.top_k, "K2": _power(sizes.top_k), "CHUNK": _CHUNK}
    return {
        "E": sizes.experts,
        "E2": _power(sizes.experts),
        "D": sizes.size,
        "F": sizes.inner,
        "BLOCK": BLOCK_ROWS,
        "OUT": PROGRAM_OUTPUTS,
        "UNIT": inputs_per_step(form),
        "SCALED": form.block or 1,
        "FORM": FORMS[form.format],
        "NEXT": FORMS[form.following],
        "NATIVE": int(capability in _NATIVE_NVFP4),
    }


def argument_types(form: KernelForm) -> dict[str, str]:
    """Return the types of a kernel's arguments by parameter, in order."""
    if form.function == SORT:
        return {
            "index": "*i32",
            "positions": "*i64",
            "order": "*i32",
            "counts": "*i32",
            "tokens": "i32",
        }
    plain = _TYPES[form.dtype]
    if form.function == ROUND:
        return {"x": f"*{plain}", "codes": "*u8", "tokens": "i32", "scale": "fp32"}
    taken, written = (_states(plain, each) for each in (form.format, form.following))
    stored = "u8" if form.format == "int4" else taken
    blocks = plain if form.format == "int4" else "u8"
    if form.function == DOWN_KERNEL:
        first, last, scale = "inner", "rows", "unused"
    else:
        first, last, scale = "x", "inner", "inner_scale"
    weights = {"values": stored, "blocks": blocks, "scales": "fp32"}
    pointers = {first: taken, **weights, "order": "i32", "counts": "i32", last: written}
    return {**{name: f"*{kind}" for name, kind in pointers.items()}, "tokens": "i32", scale: "fp32"}


def _states(plain: str, format: str | None) -> str:
    """Return the type of the input rows of a product whose weights have this format."""
    if format not in ROUNDED:
        return plain
    return _TYPES["float8_e4m3fn"] if format == "fp8" else _TYPES["uint8"]


def _power(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()
