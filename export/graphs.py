"""Exports a checkpoint to a bundle: ONNX graphs, tokenizer and embedding table."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.cache import kept_piece, unfinished
from canvasrt.calibration_prompts import (
    CALIBRATED,
    CALIBRATIONS,
    QUANTIZATIONS,
    CalibrationPrompts,
    check_calibration,
    work_of,
)
from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.checkpoints.description import Description, describe
from canvasrt.checkpoints.locate import fingerprint
from canvasrt.checkpoints.quantized import Quantization
from canvasrt.checkpoints.weight_names import TABLE
from canvasrt.defaults import LAYERS_PER_SEGMENT
from canvasrt.errors import CanvasError
from canvasrt.export import onnx
from canvasrt.export.checkpoint import Checkpoint, bytes_of
from canvasrt.export.lora import Adapted, load_adapter
from canvasrt.export.prequantized import Prequantized
from canvasrt.export.quantize.calibrate import Calibration, calibrate
from canvasrt.export.quantize.quantize import PACKAGES as QUANTIZERS
from canvasrt.export.quantize.quantize import Quantizer, counted
from canvasrt.export.quantize.stored_weights import CheckpointWeights
from canvasrt.export.segments import EMBEDDING_FILE, SegmentModule, segments
from canvasrt.export.weights import weights
from canvasrt.graphs.embedding_table import embedding_entry
from canvasrt.progress import counter
from canvasrt.recipes.recipe import Recipe
from canvasrt.staging import check_output, staging

HOST_HEAD_FILE = "host_head.bin"
PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript")
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export_graphs(
    checkpoint: str | Path | Description,
    out: Path | str,
    layers_per_segment: int = LAYERS_PER_SEGMENT,
    precision: str | None = None,
    adapters: Sequence[tuple[str | Path, float]] = (),
    calibration: Path | None = None,
    recipe: Recipe | None = None,
) -> Bundle:
    """Write the graph bundle of `checkpoint` to `out`.

    Args:
        checkpoint: a folder in the Hugging Face layout, a hub name, the name of a bundled checkpoint, or a description
        of one.
        layers_per_segment: layers per body graph.
        precision: the precision of weights and computation, a key of `TORCH_DTYPES`, by default fp32. A quantized
        checkpoint's default is its own precision: codes are copied to the graphs unchanged, and the rest is bf16.
        adapters: PEFT LoRA adapters to merge, each a folder and a factor.
        calibration: a JSONL file of calibration prompts, for a recipe or for a quantized checkpoint without activation
        scales. By default, canvasrt's own prompts are used.
        recipe: how to quantize the weights during a bf16 export. The bundle equals one that `quantize_graphs` makes
        from a bf16 export.

    Raises `CanvasError` for a checkpoint or adapter that is missing, damaged or of a different architecture, and if
    `out` is not empty. A call that fails does not write `out`. Its progress in calibrating and quantizing stays in the
    cache, and another call continues from there.
    """
    found = checkpoint if isinstance(checkpoint, Description) else describe(checkpoint)
    folder, config, how = found.folder, found.model, found.quantization
    if recipe is not None:
        precision = "bf16"
    _check_precision(folder, how, precision)
    if adapters:
        found.check_plain()
    merged = [load_adapter(path, weight) for path, weight in adapters]
    source = Adapted(folder, merged) if merged else Checkpoint(folder)
    source.check_tied()
    packs = how is not None and precision not in TORCH_DTYPES
    base = "bf16" if packs else precision or "fp32"
    dtype, out = TORCH_DTYPES[base], Path(out)
    check_output(out)
    parts = segments(config, layers_per_segment, dtype)
    own = Prequantized(how, parts, source, config, dtype, packs) if how else None
    _check_weights(parts, source, own)
    unscaled = own.recipe if own is not None and packs and not own.static else None
    check_calibration(calibration, (recipe or unscaled) is not None, "this checkpoint")
    made_from = {
        "kind": "checkpoint",
        "files": dict(found.hashes or fingerprint(folder)),
        **({"adapters": [each.to_json() for each in merged]} if merged else {}),
    }
    with contextlib.ExitStack() as stack:
        room, observed = None, Calibration()
        if chosen := recipe or unscaled:
            prompts = None
            if chosen.is_calibrated:
                prompts = CalibrationPrompts.of(
                    calibration, chosen, config, found.sampler, made_from, found.tokenizer
                )
            work = work_of({"checkpoint": made_from}, chosen, prompts)
            if prompts is not None:
                held = own.held if own else {}
                read = CheckpointWeights(source, config, found.sampler, dtype, held)
                with unfinished(CALIBRATIONS, work, keep=CALIBRATED) as progress:
                    observed = calibrate(read, chosen, prompts, progress)
            cut = {"layers_per_segment": layers_per_segment}
            room = stack.enter_context(unfinished(QUANTIZATIONS, work | cut))
        quantizer = None
        if recipe is not None:
            quantizer = Quantizer(config, recipe, observed)
        elif own is not None and packs:
            quantizer = Quantizer(config, own.recipe, observed, own.packed)
        tmp = stack.enter_context(staging(out))
        what = "quantizing" if recipe else f"exporting graphs ({base})"
        advance = counter(what, sum(map(_size, parts)))
        _write_graphs(parts, config, source, tmp, advance, quantizer, own, room)
        (head,) = (part for part in parts if part.name == "head")
        host_head = _write_host_head(head, source, tmp, dtype, own)
        if recipe is not None and quantizer is not None:
            quantizer.write_calibration(tmp)
        write_manifest(
            tmp,
            kind="graphs",
            made_from={**made_from, **(quantizer.made_from if quantizer else {})},
            options={
                "precision": base,
                "layers_per_segment": layers_per_segment,
                **(own.options() if own else {}),
                **(quantizer.options(base) if quantizer else {}),
            },
            model=config,
            sampler=found.sampler,
            segments=[_entry(part, quantizer) for part in parts],
            embedding={**embedding_entry(tmp / head.file), "host_head": host_head},
            tokenizer=_copy_tokenizer(found, tmp),
            packages=(*PACKAGES, *(QUANTIZERS if recipe else ())),
        )
    return load_bundle(out, kind="graphs", check=False)


def _check_precision(folder: Path, how: Quantization | None, precision: str | None) -> None:
    known = (*TORCH_DTYPES, *([how.precision] if how else []))
    if precision is not None and precision not in known:
        raise CanvasError(
            f"{folder} cannot be exported in {precision!r}", f"give one of {', '.join(known)}"
        )


def _check_weights(
    parts: Sequence[SegmentModule], source: Checkpoint, quantized: Prequantized | None
) -> None:
    """Before the first graph is traced, raise CanvasError for a weight that is missing or has a wrong shape. Also
    check that small weights, which can be read in seconds, are finite. Large weights are checked when they are
    written."""
    for part in parts:
        for weight in weights(part.module, part.sources, source):
            if quantized is not None and quantized.holds(part, weight):
                continue
            weight.check()
            if len(weight.shape) < 2 or part.name == "vision":
                for _ in weight.read(torch.float32):
                    pass


def _size(part: SegmentModule) -> int:
    return sum(each.numel() for each in part.module.parameters())


def _write_graphs(
    parts: Sequence[SegmentModule],
    config: ModelConfig,
    source: Checkpoint,
    out: Path,
    advance: Callable[[int], None],
    quantizer: Quantizer | None,
    own: Prequantized | None,
    room: Path | None,
) -> None:
    """Trace and write every segment. Segments that an interrupted call left in the folder `room` are linked instead."""
    traced: dict[Layer, ir.Model] = {}

    def write(part: SegmentModule, folder: Path) -> None:
        model = part.trace(config, traced)
        items = counted(weights(part.module, part.sources, source), advance)
        if own:
            items = own.widened(part, items)
        onnx.write_graph(
            model,
            quantizer.rewrite(part, model, items) if quantizer else items,
            folder / part.file,
            part.dtype,
            own_files={TABLE: EMBEDDING_FILE},
        )

    for part in parts:
        if room is None:
            write(part, out)
        elif kept_piece(room / part.name, partial(write, part), out):
            advance(_size(part))


def _write_host_head(
    part: SegmentModule,
    source: Checkpoint,
    out: Path,
    dtype: torch.dtype,
    quantized: Prequantized | None,
) -> dict[str, Any]:
    """Write the head's norms and self-conditioning weights, concatenated, to `out`.

    Returns the manifest's entry: file, dtype, and the weights in file order. The table and all weights that the
    checkpoint stores quantized are left out. If a self-conditioning weight is left out, the host cannot compute
    self-conditioning. (Only requests of several steps need it.)
    """
    held: list[dict[str, Any]] = []
    with (out / HOST_HEAD_FILE).open("wb") as file:
        for weight in weights(part.module, part.sources, source):
            if weight.name == "table" or (quantized and quantized.holds(part, weight)):
                continue
            held.append({"name": weight.name, "shape": list(weight.shape)})
            for piece in weight.read(dtype):
                file.write(bytes_of(piece))
    return {
        "file": HOST_HEAD_FILE,
        "dtype": str(dtype).removeprefix("torch."),
        "weights": held,
    }


def _entry(part: SegmentModule, quantizer: Quantizer | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": part.name, "file": part.file}
    if part.layers:
        entry["layers"] = list(part.layers)
    formats = quantizer.formats(part) if quantizer else {}
    return entry | {"quantized": formats} if formats else entry


def _copy_tokenizer(found: Description, out: Path) -> list[str] | None:
    """Copy the tokenizer's files to `tokenizer/`. Return their paths; None if the checkpoint has no tokenizer."""
    if not found.tokenizer:
        return None
    (out / "tokenizer").mkdir()
    for name, file in found.tokenizer.items():
        shutil.copyfile(file, out / "tokenizer" / name)
    return [f"tokenizer/{name}" for name in found.tokenizer]
