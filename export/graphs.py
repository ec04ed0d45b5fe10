"""Exports a checkpoint to a bundle of ONNX graphs with its tokenizer and embedding table."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.checkpoints import locate
from canvasrt.checkpoints.config import Layer, ModelConfig
from canvasrt.checkpoints.quantized import Quantization, quantization_of
from canvasrt.defaults import LAYERS_PER_SEGMENT
from canvasrt.errors import CanvasError
from canvasrt.export import onnx
from canvasrt.export.checkpoint import Checkpoint
from canvasrt.export.host_head import write_host_head
from canvasrt.export.lora import Adapted, load_adapter
from canvasrt.export.prequantized import Prequantized
from canvasrt.export.segments import EMBEDDING_FILE, SegmentModule, segments
from canvasrt.export.weights import weights
from canvasrt.graphs.table import embedding_entry
from canvasrt.recipes.calibration import check_calibration
from canvasrt.staging import staging

# Called with (bytes of weights written so far, total bytes).
SegmentProgress = Callable[[int, int], None]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript")
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export_graphs(
    checkpoint: str | Path,
    out: Path | str,
    layers_per_segment: int = LAYERS_PER_SEGMENT,
    precision: str | None = None,
    progress: SegmentProgress | None = None,
    adapters: Sequence[tuple[str | Path, float]] = (),
    calibration: Path | None = None,
    hashes: Mapping[str, str] | None = None,
) -> Bundle:
    """Write the graph bundle of `checkpoint` to `out`.

    Args:
        checkpoint: a folder in the Hugging Face layout, a hub name, or a bundled one's name.
        layers_per_segment: layers per body graph.
        precision: a key of `DTYPES`, for weights and computation. The default is fp32. A quantized
            checkpoint defaults to its own: its codes go into the graphs unchanged, and the rest is
            bf16.
        adapters: folders of PEFT LoRA adapters and their weights, merged in.
        calibration: a JSONL file of prompts, for a quantized checkpoint without activation scales.
        hashes: the fingerprint of `checkpoint`, which is then a folder that was checked before.

    Raises `CanvasError` for a checkpoint or adapter that is missing, damaged or of another
    architecture, and when `out` is not empty. Nothing is left behind then.
    """
    folder = Path(checkpoint) if hashes else locate.find_checkpoint(checkpoint)
    hashes = hashes or locate.fingerprint(folder)
    config, sampler = ModelConfig.from_checkpoint(folder)
    how = quantization_of(folder)
    _check_options(folder, how, precision, adapters)
    merged = [load_adapter(path, weight) for path, weight in adapters]
    source = Adapted(folder, merged) if merged else Checkpoint(folder)
    packs = how is not None and precision not in TORCH_DTYPES
    base = "bf16" if packs else precision or "fp32"
    out = Path(out)
    with staging(out) as tmp:
        parts = segments(config, layers_per_segment, TORCH_DTYPES[base])
        quantized = (
            Prequantized(how, parts, source, config, TORCH_DTYPES[base], packs) if how else None
        )
        _check_weights(parts, source, quantized)
        is_calibrated = quantized is not None and packs and not quantized.static
        check_calibration(calibration, is_calibrated, "this checkpoint")
        if quantized and is_calibrated:
            quantized.calibrate(
                lambda wide: export_graphs(folder, wide, precision="bf16", hashes=hashes),
                out,
                calibration,
            )
        _write_graphs(parts, config, source, tmp, TORCH_DTYPES[base], progress, quantized)
        (head,) = (part for part in parts if part.name == "head")
        host_head = write_host_head(head, source, tmp, TORCH_DTYPES[base], quantized)
        write_manifest(
            tmp,
            kind="graphs",
            made_from={
                "kind": "checkpoint",
                "files": dict(hashes),
                **({"adapters": [each.to_json() for each in merged]} if merged else {}),
                **(quantized.made_from if quantized else {}),
            },
            options={
                "precision": base,
                "layers_per_segment": layers_per_segment,
                **(quantized.options if quantized else {}),
            },
            model=config,
            sampler=sampler,
            segments=[_entry(part, quantized) for part in parts],
            embedding={
                **embedding_entry(tmp / next(p.file for p in parts if p.name == "head")),
                "host_head": host_head,
            },
            tokenizer=_copy_tokenizer(folder, tmp),
            packages=PACKAGES,
        )
    return load_bundle(out, kind="graphs", check=False)


def _check_options(
    folder: Path,
    how: Quantization | None,
    precision: str | None,
    adapters: Sequence[tuple[str | Path, float]],
) -> None:
    known = (*TORCH_DTYPES, *([how.precision] if how else []))
    if precision is not None and precision not in known:
        raise CanvasError(
            f"{folder} cannot be exported in {precision!r}", f"give one of {', '.join(known)}"
        )
    if how is not None and adapters:
        raise CanvasError(
            f"{folder} is quantized ({how.algorithm}), but adapters need plain weights",
            "give the bf16 checkpoint that the adapter was trained on; `canvasrt build --precision`"
            " quantizes it with the adapter merged",
        )


def _check_weights(
    parts: Sequence[SegmentModule], source: Checkpoint, quantized: Prequantized | None
) -> None:
    """Raise CanvasError for a weight that is missing or has another shape, before the first graph
    is traced."""
    for part in parts:
        for weight in weights(part.module, part.sources, source):
            if quantized is None or not quantized.holds(part, weight):
                weight.check()


def _write_graphs(
    parts: Sequence[SegmentModule],
    config: ModelConfig,
    source: Checkpoint,
    out: Path,
    dtype: torch.dtype,
    progress: SegmentProgress | None,
    quantized: Prequantized | None,
) -> None:
    """Trace and write every segment."""
    total = sum(p.numel() * dtype.itemsize for part in parts for p in part.module.parameters())
    total -= quantized.saved if quantized else 0
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total)

    traced: dict[Layer, ir.Model] = {}
    for part in parts:
        model = part.trace(config, traced)
        each = weights(part.module, part.sources, source)
        onnx.write_graph(
            model,
            quantized.rewrite(part, model, each) if quantized else each,
            out / part.file,
            dtype,
            own_files={"table": EMBEDDING_FILE},
            advance=advance,
        )


def _entry(part: SegmentModule, quantized: Prequantized | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": part.name, "file": part.file}
    if part.layers:
        entry["layers"] = list(part.layers)
    formats = quantized.formats(part) if quantized else {}
    return entry | {"quantized": formats} if formats else entry


def _copy_tokenizer(folder: Path, out: Path) -> list[str] | None:
    """Copy the tokenizer's files to `tokenizer/`. Return None if the checkpoint has no tokenizer."""
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if "tokenizer.json" not in names:
        return None
    (out / "tokenizer").mkdir()
    for name in names:
        shutil.copyfile(folder / name, out / "tokenizer" / name)
    return [f"tokenizer/{name}" for name in names]
