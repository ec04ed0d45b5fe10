"""Export: a checkpoint becomes a bundle of ONNX graphs with its tokenizer and its embedding table."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from canvasrt import checkpoints
from canvasrt.bundle import Bundle, load_bundle, staging, write_manifest
from canvasrt.export import onnx
from canvasrt.export.checkpoint import Checkpoint
from canvasrt.export.segments import (
    EMBEDDING_FILE,
    LAYERS_PER_SEGMENT,
    Segment,
    segments,
)
from canvasrt.export.weights import weights
from canvasrt.model import Layer, ModelConfig

# Called with (bytes of weights written so far, bytes in all).
Progress = Callable[[int, int], None]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export(
    checkpoint: str | Path,
    out: Path | str,
    layers_per_segment: int = LAYERS_PER_SEGMENT,
    precision: str = "fp32",
    progress: Progress | None = None,
) -> Bundle:
    """Write the graph bundle of `checkpoint` to `out`.

    Args: `checkpoint` a folder in the Hugging Face layout, a hub name, or `demo`; `layers_per_segment` the layers of
    one body graph; `precision` a key of `DTYPES`, that of the weights and of what the graphs compute in. Raises `CanvasError` for a checkpoint that is missing, damaged, or of another architecture, and
    when `out` is not empty; then nothing is left behind.
    """
    folder = checkpoints.resolve(checkpoint)
    config, sampler = ModelConfig.from_checkpoint(folder)
    source = Checkpoint(folder)
    with staging(Path(out)) as tmp:
        parts = segments(config, layers_per_segment, DTYPES[precision])
        _write_graphs(parts, config, source, tmp, DTYPES[precision], progress)
        write_manifest(
            tmp,
            kind="graphs",
            made_from={"kind": "checkpoint", "files": checkpoints.fingerprint(folder)},
            options={"precision": precision, "layers_per_segment": layers_per_segment},
            model=config,
            sampler=sampler,
            segments=[_entry(part) for part in parts],
            embedding={
                "file": EMBEDDING_FILE,
                "dtype": str(DTYPES[precision]).removeprefix("torch."),
                "shape": [config.vocab_size, config.hidden_size],
            },
            tokenizer=_copy_tokenizer(folder, tmp),
            packages=PACKAGES,
        )
    return load_bundle(out, kind="graphs", check=False)


def _write_graphs(
    parts: Sequence[Segment],
    config: ModelConfig,
    source: Checkpoint,
    out: Path,
    dtype: torch.dtype,
    progress: Progress | None,
) -> None:
    """Trace and write every segment."""
    total = sum(p.numel() * dtype.itemsize for part in parts for p in part.module.parameters())
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total)

    traced: dict[Layer, ir.Model] = {}
    for part in parts:
        onnx.write(
            part.trace(config, traced),
            weights(part.module, part.sources, source),
            out / part.file,
            dtype,
            own_files={"table": EMBEDDING_FILE},
            advance=advance,
        )


def _entry(part: Segment) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": part.name, "file": part.file}
    return entry | {"layers": list(part.layers)} if part.layers else entry


def _copy_tokenizer(folder: Path, out: Path) -> list[str] | None:
    """Copy the tokenizer's files to `tokenizer/`; None when the checkpoint has no tokenizer."""
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if "tokenizer.json" not in names:
        return None
    (out / "tokenizer").mkdir()
    for name in names:
        shutil.copyfile(folder / name, out / "tokenizer" / name)
    return [f"tokenizer/{name}" for name in names]
