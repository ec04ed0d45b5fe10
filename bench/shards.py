"""Writes sharded safetensors a piece at a time: the library's own writer needs all tensors of a file in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from canvasrt.checkpoints.locate import INDEX
from canvasrt.export.checkpoint import SAFETENSORS_DTYPES


@dataclass(frozen=True)
class TensorPiece:
    """One tensor to write. `chunks` yields its little-endian bytes in order, when they are needed."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[memoryview]]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(out: Path, shards: Sequence[Sequence[TensorPiece]]) -> None:
    """Write one file for each of `shards`, and the index over them, in the Hugging Face layout."""
    index: dict[str, str] = {}
    for number, pieces in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(out / file, pieces)
        index |= {piece.name: file for piece in pieces}
    total = sum(piece.size for pieces in shards for piece in pieces)
    data = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    (out / INDEX).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def write_shard(file: Path, pieces: Sequence[TensorPiece]) -> None:
    """Write one safetensors file."""
    # The widest types first, so that each tensor is aligned to its own elements.
    pieces = sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.name))
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        start, end = end, end + piece.size
        header[piece.name] = {
            "dtype": names[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            written = sum(out.write(chunk) for chunk in piece.chunks())
            assert written == piece.size, f"{piece.name}: wrote {written} bytes, not {piece.size}"
