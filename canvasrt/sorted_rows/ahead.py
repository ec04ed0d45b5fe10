"""Compiles the kernels ahead of time, for GPUs that need not be here."""

from __future__ import annotations

from dataclasses import dataclass

from canvasrt.cache import cache_folder
from canvasrt.errors import CanvasError
from canvasrt.extras import require
from canvasrt.sorted_rows.description import (
    BLOCK_ROWS,
    DOWN_KERNEL,
    PROGRAM_OUTPUTS,
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
_FORMS = {None: 0, "int4": 1, "fp8": 2}
# Tokens that the sort looks at at once.
_CHUNK = 256
_WARPS, _STAGES = 4, 3


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel for one compute capability: its image, its name in there, bytes of shared memory, threads per program, and
    its PTX."""

    image: bytes
    entry: str
    shared: int
    threads: int
    ptx: str


def compile_kernel(form: KernelForm, capability: tuple[int, int]) -> CompiledKernel:
    """Compile one kernel. Raises CanvasError if Triton the language is not installed."""
    triton = require("triton", "sorted")
    compiler, backends = (
        require("triton.compiler", "sorted"),
        require("triton.backends.compiler", "sorted"),
    )
    from canvasrt.sorted_rows import triton_kernels

    function = getattr(triton_kernels, form.function)
    names, fixed, types = list(function.arg_names), constants(form), argument_types(form)
    source = compiler.ASTSource(
        function,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in fixed.items()},
        # Addresses are aligned, so that 16 bytes are read at once.
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind.startswith("*")
        },
    )
    major, minor = capability
    target = backends.GPUTarget("cuda", 10 * major + minor, 32)
    options = {"num_warps": _WARPS, "num_stages": _STAGES}
    with triton.knobs.compilation.scope(), triton.knobs.cache.scope():
        # Its lines would name this machine's folders.
        triton.knobs.compilation.disable_line_info = True
        triton.knobs.cache.dir = str(cache_folder() / "triton")
        made = triton.compile(source, target=target, options=options)
    # The arguments, and two addresses of scratch memory, see `kernel_arguments`. Another number would be read past the end.
    count = made.asm["ptx"].partition(".entry")[2].partition(")")[0].count(".param")
    if count != len(types) + 2 or made.metadata.global_scratch_size:
        raise CanvasError(
            f"triton {triton.__version__} compiles kernels with {count} parameters, not {len(types) + 2}",
            "install the version of constraints.txt: pip install -c constraints.txt triton",
        )
    return CompiledKernel(
        made.asm["cubin"],
        made.metadata.name,
        made.metadata.shared,
        32 * made.metadata.num_warps,
        made.asm["ptx"],
    )


def constants(form: KernelForm) -> dict[str, int]:
    """Return what a kernel is compiled for, by parameter."""
    sizes = form.sizes
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
        "FORM": _FORMS[form.format],
        "NEXT": _FORMS[form.following if form.following == "fp8" else None],
    }


def argument_types(form: KernelForm) -> dict[str, str]:
    """Return the types of a kernel's arguments, by parameter, in the order in which it takes them."""
    if form.function == SORT:
        return {
            "index": "*i32",
            "positions": "*i64",
            "order": "*i32",
            "counts": "*i32",
            "tokens": "i32",
        }
    plain = _TYPES[form.dtype]
    taken = {"fp8": _TYPES["float8_e4m3fn"]}.get(form.format or "", plain)
    stored = {"fp8": taken, "int4": "u8"}.get(form.format or "", plain)
    scales = plain if form.format == "int4" else "fp32"
    written = _TYPES["float8_e4m3fn"] if form.following == "fp8" else plain
    if form.function == DOWN_KERNEL:
        first, last, scale = "inner", "rows", "unused"
    else:
        first, last, scale = "x", "inner", "inner_scale"
    pointers = {first: taken, "values": stored, "scales": scales, "order": "i32", "counts": "i32"}
    found = {name: f"*{kind}" for name, kind in (pointers | {last: written}).items()}
    return {**found, "tokens": "i32", scale: "fp32"}


def _power(count: int) -> int:
    """Return the least power of two that is not below `count`."""
    return 1 << max(0, count - 1).bit_length()
