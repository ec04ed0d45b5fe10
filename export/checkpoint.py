"""A lazy reader of Hugging Face checkpoints: sharded safetensors, one tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from canvasrt.checkpoints.locate import INDEX, read_index
from canvasrt.errors import CanvasError
from canvasrt.export.shards import Shard, TensorEntry

SINGLE = "model.safetensors"

# Text weights are tied: a checkpoint may store them under the decoder's, the encoder's or the
# output's name.
_ALIASES = (
    ("model.decoder.", "model.encoder.language_model."),
    ("model.decoder.embed_tokens.weight", "lm_head.weight"),
)
# How many bytes of a large tensor are in memory at once.
_CHUNK = 1 << 28


class Checkpoint:
    """The tensors of a checkpoint folder by name."""

    def __init__(self, path: Path) -> None:
        """Read the index of `path`. Raises `CanvasError` when a shard is missing or truncated."""
        self.path = path
        self._names = self._index()
        self._shards = {name: self._open(name) for name in sorted(set(self._names.values()))}

    @property
    def files(self) -> list[Path]:
        """The weight files, in name order."""
        return [self.path / name for name in self._shards]

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype in the file."""
        return self._entry(name)[2].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._entry(name)[2].shape

    def read(self, name: str) -> Tensor:
        """Return one tensor in the file's dtype."""
        shard, found, _ = self._entry(name)
        return shard.read(found)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Yield one tensor in pieces along its first axis, so the largest ones are never in memory
        as a whole."""
        shard, found, entry = self._entry(name)
        if not entry.shape:
            yield shard.read(found)[None]
            return
        row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        count = max(1, _CHUNK // max(row, 1))
        for first in range(0, entry.shape[0], count):
            yield shard.read(found, first, min(count, entry.shape[0] - first))

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
        # Except the layer scalars: encoder and decoder have their own.
        if name.endswith("layer_scalar"):
            return None
        for ours, theirs in _ALIASES:
            alias = theirs + name[len(ours) :]
            if name.startswith(ours) and alias in self._names:
                return alias
        return None

    def _index(self) -> dict[str, str]:
        """Return tensor name → file."""
        index, single = read_index(self.path), self.path / SINGLE
        if index is not None:
            return index
        if single.is_file():
            return dict.fromkeys(Shard(single).tensors, SINGLE)
        raise CanvasError(
            f"{self.path} has neither {SINGLE} nor {INDEX}",
            "give a folder in the Hugging Face layout with safetensors weights",
        )

    def _open(self, name: str) -> Shard:
        try:
            return Shard(self.path / name)
        except FileNotFoundError as cause:
            raise CanvasError(
                f"{self.path / name} is missing, although {INDEX} lists it",
                "fetch the checkpoint again",
            ) from cause


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's values as little-endian bytes, without a copy if it is contiguous."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
