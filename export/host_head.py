"""Writes the head's small weights to a file of their own, from which the host scores tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from canvasrt.export.checkpoint import Checkpoint, bytes_of
from canvasrt.export.prequantized import Prequantized
from canvasrt.export.segments import SegmentModule
from canvasrt.export.weights import weights

HOST_HEAD_FILE = "host_head.bin"


def write_host_head(
    part: SegmentModule,
    source: Checkpoint,
    out: Path,
    dtype: torch.dtype,
    quantized: Prequantized | None = None,
) -> dict[str, Any]:
    """Write norms and self-conditioning weights of the head, one after another, to `out`.

    Returns the manifest's entry: file, dtype, and the weights in file order. Weights that
    the checkpoint stores quantized are left out; those only matter for more than one step.
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
