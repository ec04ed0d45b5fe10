"""Safetensors files, written and read a piece at a time.

The library's own writer needs all tensors of a file in memory. Its reader maps the file, and the
mapped pages count as this process's memory as long as the file is open.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from canvasrt.checkpoints.locate import INDEX
from canvasrt.errors import CanvasError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file; `start` is where its bytes begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class Shard:
    """One safetensors file. Only its header stays in memory."""

    def __init__(self, file: Path) -> None:
        """Read the header. Raises `CanvasError` for an incomplete file, FileNotFoundError for a
        missing one."""
        self.file = file
        try:
            # The library checks that the header is sound and that no byte is missing.
            safe_open(file, framework="pt").keys()
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError) as cause:
            raise CanvasError(
                f"{file} is not a complete safetensors file: {cause}", "fetch the checkpoint again"
            ) from cause
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(length))
        self.tensors = {
            name: self._entry(name, entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def read(self, name: str, first: int = 0, rows: int | None = None) -> Tensor:
        """Return one tensor in the file's dtype, or `rows` of its first axis from `first` on."""
        entry = self.tensors[name]
        shape = entry.shape
        start = entry.start
        if rows is not None:
            start += first * math.prod(shape[1:]) * entry.dtype.itemsize
            shape = (rows, *shape[1:])
        data = np.empty(math.prod(shape) * entry.dtype.itemsize, np.uint8)
        try:
            with self.file.open("rb", buffering=0) as handle:
                handle.seek(start)
                found = _fill(handle, data)
        except OSError as cause:
            raise self._damaged(name, str(cause)) from cause
        if found != len(data):
            raise self._damaged(name, "it ends too early")
        return torch.from_numpy(data).view(entry.dtype).view(shape)

    def _entry(self, name: str, entry: dict[str, Any], base: int) -> TensorEntry:
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CanvasError(
                f"{name} in {self.file} has the type {entry['dtype']}, which canvasrt does not support",
                f"use one of {', '.join(_DTYPES)}",
            )
        return TensorEntry(dtype, tuple(entry["shape"]), base + entry["data_offsets"][0])

    def _damaged(self, name: str, why: str) -> CanvasError:
        return CanvasError(
            f"cannot read {name} from {self.file}: {why}",
            "the file is damaged; fetch or save the checkpoint again",
        )


def _fill(handle: FileIO, data: np.ndarray) -> int:
    """Fill all of `data`; a single call reads at most 2 GB."""
    found = 0
    while found < len(data):
        count = handle.readinto(data[found:].data)
        if not count:
            break
        found += count
    return found


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
    names = {dtype: name for name, dtype in _DTYPES.items()}
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
