"""A lazy reader of Hugging Face checkpoints: sharded safetensors, one tensor in memory at a time.

Unlike the safetensors library, it does not memory-map files, because the mapped pages of an open file would count as
this process's memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from canvasrt.checkpoints.locate import INDEX, SINGLE, read_index
from canvasrt.errors import CanvasError

# A tied text weight can have the decoder's or the encoder's name; the embedding table can also be named `lm_head`.
_ALIASES = (
    ("model.decoder.", "model.encoder.language_model."),
    ("model.decoder.embed_tokens.weight", "lm_head.weight"),
)
# Weights whose names end with this differ between encoder and decoder.
_UNTIED = "layer_scalar"
# At most this many bytes of a tensor are read at a time.
_CHUNK = 1 << 26
SAFETENSORS_DTYPES = {
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


class Checkpoint:
    """A checkpoint folder, from which tensors are read by name."""

    def __init__(self, path: Path) -> None:
        """Read the index of `path`. Raises `CanvasError` if a shard is missing or truncated."""
        self.path = path
        self._names = self._index()
        self._shards = {name: Shard(path / name) for name in sorted(set(self._names.values()))}

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the file stores a tensor."""
        return self._entry(name)[2].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._entry(name)[2].shape

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._entry(name)[0].file

    def read(self, name: str) -> Tensor:
        """Return one tensor in the file's dtype."""
        shard, found, _ = self._entry(name)
        return shard.read(found)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Yield one tensor in pieces along its first axis, so that large tensors are never completely in memory."""
        shard, found, entry = self._entry(name)
        if not entry.shape:
            yield shard.read(found)[None]
            return
        row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        count = max(1, _CHUNK // max(row, 1))
        for first in range(0, entry.shape[0], count):
            yield shard.read(found, first, min(count, entry.shape[0] - first))

    def check_tied(self) -> None:
        """Raise CanvasError if a tied weight is stored twice with different values, because graphs store it once."""
        for ours, theirs in _ALIASES:
            for name in self._names:
                alias = theirs + name[len(ours) :]
                if not name.startswith(ours) or alias not in self._names:
                    continue
                if not name.endswith(_UNTIED) and not self._are_equal(name, alias):
                    raise CanvasError(
                        f"{name} and {alias} of {self.path} differ",
                        "canvasrt needs one weight for both: remove one of them from the checkpoint",
                    )

    def _are_equal(self, name: str, other: str) -> bool:
        kinds = [(self.shape(each), self.dtype(each)) for each in (name, other)]
        # Compare what the files store, because `self.chunks` can merge adapters.
        pairs = zip(Checkpoint.chunks(self, name), Checkpoint.chunks(self, other), strict=False)
        return kinds[0] == kinds[1] and all(bytes_of(a) == bytes_of(b) for a, b in pairs)

    def rows(self, name: str, numbers: Sequence[int] | np.ndarray) -> Tensor:
        """Return some rows of one tensor in the file's dtype."""
        shard, found, _ = self._entry(name)
        return torch.cat([shard.read(found, int(number), 1) for number in numbers])

    def _entry(self, name: str) -> tuple[Shard, str, TensorEntry]:
        found = self._find(name)
        if found is None:
            raise CanvasError(
                f"{self.path} has no tensor {name}",
                "this DiffusionGemma checkpoint is incomplete; fetch or save it again",
            )
        shard = self._shards[self._names[found]]
        if found not in shard.tensors:
            raise CanvasError(
                f"{shard.file} has no tensor {found}, although {INDEX} lists it",
                "fetch the checkpoint again",
            )
        return shard, found, shard.tensors[found]

    def _find(self, name: str) -> str | None:
        if name in self._names:
            return name
        if name.endswith(_UNTIED):
            return None
        for ours, theirs in _ALIASES:
            alias = theirs + name[len(ours) :]
            if name.startswith(ours) and alias in self._names:
                return alias
        return None

    def _index(self) -> dict[str, str]:
        """Return tensor name → file name."""
        index, single = read_index(self.path), self.path / SINGLE
        if index is not None:
            return index
        if single.is_file():
            return dict.fromkeys(Shard(single).tensors, SINGLE)
        raise CanvasError(
            f"{self.path} has neither {SINGLE} nor {INDEX}",
            "give a folder in the Hugging Face layout with safetensors weights",
        )


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's values as little-endian bytes. A contiguous tensor is not copied."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file. Its data begins at byte `start` of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class Shard:
    """One safetensors file. Only its header stays in memory."""

    def __init__(self, file: Path) -> None:
        """Read the header. Raises `CanvasError` for a file that is incomplete or missing."""
        self.file = file
        try:
            # The library checks that the header is valid and the file complete.
            safe_open(file, framework="pt").keys()
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
        """Return one tensor in the file's dtype, or, if `rows` is set, only that many rows, starting at row `first`."""
        entry = self.tensors[name]
        shape = entry.shape
        start = entry.start
        if rows is not None:
            start += first * math.prod(shape[1:]) * entry.dtype.itemsize
            shape = (rows, *shape[1:])
        data = np.empty(math.prod(shape) * entry.dtype.itemsize, np.uint8)
        try:
            with self.file.open("rb") as handle:
                handle.seek(start)
                found = handle.readinto(data.data)
        except OSError as cause:
            raise self._damaged(name, str(cause)) from cause
        if found != len(data):
            raise self._damaged(name, "it ends too early")
        return torch.from_numpy(data).view(entry.dtype).view(shape)

    def _entry(self, name: str, entry: dict[str, Any], base: int) -> TensorEntry:
        dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CanvasError(
                f"{name} in {self.file} has the type {entry['dtype']}, which canvasrt does not support",
                f"use one of {', '.join(SAFETENSORS_DTYPES)}",
            )
        return TensorEntry(dtype, tuple(entry["shape"]), base + entry["data_offsets"][0])

    def _damaged(self, name: str, why: str) -> CanvasError:
        return CanvasError(
            f"cannot read {name} from {self.file}: {why}",
            "the file is damaged; fetch or save the checkpoint again",
        )
