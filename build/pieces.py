"""Cuts body segments into pieces, between which the experts' kernels run (`--experts sorted`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from canvasrt.bundle import Bundle
from canvasrt.checkpoints.weight_names import local_names
from canvasrt.extras import require
from canvasrt.roofline import store
from canvasrt.sorted_rows import ahead, predicted
from canvasrt.sorted_rows.description import (
    SORTED_SUFFIX,
    ExpertSizes,
    KernelForm,
    KernelImage,
    SortedSegment,
    layer_kernels,
)
from canvasrt.staging import link_or_copy
from canvasrt.types import Json

Capability = tuple[int, int]


@dataclass(frozen=True)
class PieceGraph:
    """The graph of one piece, and the size of its weights in bytes."""

    name: str
    file: Path
    weights: int


def write_pieces(graphs: Bundle, entry: Json, folder: Path) -> list[PieceGraph]:
    """Write the pieces of a body segment's graph to `folder`. The pieces share the graph's weight file, which is linked
    into that folder."""
    ir = require("onnx_ir", "export")
    from canvasrt.graphs.cut import cut_body

    model = ir.load(graphs.file(entry["file"]))
    data = Path(entry["file"]).with_suffix(".bin").name
    link_or_copy(graphs.file(data), folder / data)
    made = []
    for number, piece in enumerate(cut_body(model)):
        name = f"{entry['name']}.{number}"
        stored = (value.const_value for value in piece.graph.initializers.values())
        weights = sum(each.nbytes for each in stored if each is not None)
        ir.save(piece, folder / f"{name}.onnx")
        made.append(PieceGraph(name, folder / f"{name}.onnx", weights))
    return made


def join_pieces(
    graphs: Bundle,
    entry: Json,
    pieces: Mapping[str, str],
    capabilities: Iterable[Capability],
    out: Path,
) -> Json:
    """Write a segment's kernels and weights to `out`, next to the engines of its pieces.

    Returns fields of the segment's manifest entry: `file` and, if every piece has a kernel list, `kernels` (the
    joined list's file).

    pieces: engine file → SHA-256, in order.
    """
    ir = require("onnx_ir", "export")
    from canvasrt.sorted_rows.stacks import GraphExperts

    formats = entry.get("quantized") or {}
    names = local_names(entry["name"], entry["layers"], formats)
    local = {name: formats[long] for long, name in names.items()}
    sizes = ExpertSizes.of(graphs.manifest.model)
    experts = GraphExperts(ir.load(graphs.file(entry["file"])), sizes, local)
    weights = f"{entry['name']}.experts.bin"
    with (out / weights).open("wb") as file:
        layers = experts.write(file)
    each_layer = [layer_kernels(*pair) for pair in experts.forms]
    forms = dict.fromkeys(form for layer in each_layer for form in layer)
    compiled = {form.name: _compile(form, capabilities, out) for form in forms}
    kernels = {name: images for name, (images, _) in compiled.items()}
    segment = SortedSegment(
        sizes, experts.dtype, tuple(pieces.items()), weights, tuple(layers), kernels
    )
    made = {"file": f"{entry['name']}{SORTED_SUFFIX}"}
    segment.write(out / made["file"])
    lists = [out / Path(piece).with_suffix(store.KERNELS_SUFFIX) for piece in pieces]
    if all(each.is_file() for each in lists):
        made["kernels"] = f"{entry['name']}{store.KERNELS_SUFFIX}"
        instructions = {name: instruction for name, (_, instruction) in compiled.items()}
        read = [store.read(each) for each in lists]
        joined = predicted.join_lists(read, each_layer, instructions)
        store.write_kernels(joined, out / made["kernels"])
        for each in lists:
            each.unlink()
    return made


def _compile(
    form: KernelForm, capabilities: Iterable[Capability], out: Path
) -> tuple[dict[str, KernelImage], str]:
    """Compile a kernel for every capability. Return the images, and the matrix instruction that the first capability's
    image uses."""
    images: dict[str, KernelImage] = {}
    instruction = ""
    for major, minor in capabilities:
        made = ahead.compile_kernel(form, (major, minor))
        file = f"{form.name}.sm{major}{minor}.cubin"
        (out / file).write_bytes(made.image)
        instruction = instruction if images else predicted.instruction(made.ptx)
        images[f"{major}.{minor}"] = KernelImage(file, made.entry, made.shared, made.threads)
    return images, instruction
