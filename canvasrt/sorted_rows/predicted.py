"""Lists all kernels of a segment that is cut into pieces, in the same form as the builder's lists, for predictions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from canvasrt.formats import FORMATS
from canvasrt.roofline.cost import ROW_ROUNDING, ROW_SORT, SORTED_PRODUCT
from canvasrt.roofline.dims import Dim, times
from canvasrt.roofline.parse import Kernel, KernelTensor
from canvasrt.roofline.store import Programs
from canvasrt.sorted_rows.description import DOWN_KERNEL, ROUND, ROUNDED, SORT, KernelForm

# Dimensions: the rows of all blocks, including empty rows; the rows among them that belong to tokens; a call's tokens.
BLOCKED_ROWS, ROUTED_ROWS, TOKENS = "sorted_rows", "routed_rows", "batch*length"
_BUILDER_TYPES = {"float32": "Float", "float16": "Half", "bfloat16": "BFloat16"}
_INSTRUCTION = re.compile(r"mma\.sync\.[\w.:]+")
# Names of cached keys and values start with one of these.
_CACHED = ("past_key_", "past_value_")


def instruction(ptx: str) -> str:
    """Return the tensor-core instruction of a kernel; empty if it uses none."""
    found = _INSTRUCTION.search(ptx)
    return found[0] if found else ""


def join_lists(
    pieces: Sequence[Programs],
    layers: Sequence[Sequence[KernelForm]],
    instructions: Mapping[str, str],
) -> dict[str, list[Kernel]]:
    """Return each profile's kernels in the order in which they run. Between two pieces, our kernels run a layer's experts.

    layers: our kernels for each layer, in order. instructions: their tensor-core instructions, by kernel name.
    """
    programs = {}
    for profile in pieces[0]:
        kernels: list[Kernel] = []
        for number, piece in enumerate(pieces):
            kernels += [_of_piece(kernel, number) for kernel in piece[profile]]
            for form in layers[number] if number < len(layers) else ():
                kernels.append(_ours(form, number, instructions.get(form.name, "")))
        programs[profile] = kernels
    return programs


def _of_piece(kernel: Kernel, number: int) -> Kernel:
    """Return a piece's kernel with unique tensor names, because pieces use the same names for different tensors."""

    def own(tensors: tuple[KernelTensor, ...]) -> tuple[KernelTensor, ...]:
        named = (each.name.startswith(_CACHED) for each in tensors)
        return tuple(
            each if cached else replace(each, name=f"{each.name}@{number}")
            for each, cached in zip(tensors, named, strict=True)
        )

    return replace(
        kernel,
        inputs=own(kernel.inputs),
        constants=own(kernel.constants),
        outputs=own(kernel.outputs),
    )


def _ours(form: KernelForm, layer: int, tactic: str) -> Kernel:
    sizes, node = form.sizes, f"layers.{layer}.experts.{form.function}/sorted"

    def tensor(name: str, kind: str, *dims: Dim) -> KernelTensor:
        return KernelTensor(f"{node}/{name}", kind, dims)

    if form.function == SORT:
        index = tensor("index", "Int32", TOKENS, sizes.top_k)
        order = tensor("order", "Int32", TOKENS, sizes.top_k)
        return Kernel(node, ROW_SORT, (index,), (), (order,), "", (node,))
    plain = _BUILDER_TYPES[form.dtype]

    def rows(name: str, dim: Dim, width: int, format: str | None) -> tuple[KernelTensor, ...]:
        """Return the rows that a product in `format` reads, and the scales of their blocks."""
        if format not in ROUNDED:
            return (tensor(name, plain, dim, width),)
        row = FORMATS[format]
        found = (tensor(name, row.codes.builder, dim, width),)
        if row.block_scales is None:
            return found
        blocks = width // row.blocks[0]
        return (*found, tensor(f"{name}_blocks", row.block_scales.builder, dim, blocks))

    if form.function == ROUND:
        before = rows("tokens", TOKENS, sizes.size, None)
        after = rows("rounded", TOKENS, sizes.size, "nvfp4")
        return Kernel(node, ROW_ROUNDING, before, (), after, "", (node,))
    stored = FORMATS[form.format].codes.builder if form.format else plain
    outputs = form.outputs if form.function == DOWN_KERNEL else 2 * form.outputs
    # The builder lists a weight's input dimension before its output dimension.
    constants = [tensor("values", stored, sizes.experts, form.width, outputs)]
    if form.format in ROUNDED:
        constants.append(tensor("scales", "Float", sizes.experts, outputs))
    if form.format and (width := form.block or FORMATS[form.format].block(form.width)):
        kind = FORMATS[form.format].block_scales
        blocks = (sizes.experts, outputs, form.width // width)
        constants.append(tensor("blocks", kind.builder if kind else plain, *blocks))
    taken = tuple(
        replace(each, read=str(times((ROUTED_ROWS, *each.dims[1:]))))
        for each in rows("rows", BLOCKED_ROWS, form.width, form.format)
    )
    results = rows("result", ROUTED_ROWS, form.outputs, form.following)
    return Kernel(node, SORTED_PRODUCT, taken, tuple(constants), results, tactic, (node,))
