"""A lazy reader of Hugging Face checkpoints: sharded safetensors, one tensor in memory at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from canvasrt.errors import CanvasError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Text weights are tied: a checkpoint may hold them under the decoder's name, the encoder's, or the output's.
_ALIASES = (
    ("model.decoder.", "model.encoder.language_model."),
    ("model.decoder.embed_tokens.weight", "lm_head.weight"),
)


class Checkpoint:
    """The tensors of a checkpoint folder by name. Files are memory-mapped and opened once."""

    def __init__(self, path: Path) -> None:
        """Read the index of `path`; raises `CanvasError` when a shard is missing or truncated."""
        self.path = path
        self._shards = self._index()
        self._files = {name: self._open(path / name) for name in sorted(set(self._shards.values()))}

    @property
    def files(self) -> list[Path]:
        """The weight files, in name order."""
        return [self.path / name for name in self._files]

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def read(self, name: str) -> Tensor:
        """One tensor, in the dtype that the file holds it in."""
        found = self._find(name)
        if found is None:
            raise CanvasError(
                f"{self.path} has no tensor {name}",
                "this is not a whole DiffusionGemma checkpoint; fetch or save it again",
            )
        try:
            return self._files[self._shards[found]].get_tensor(found)
        except (SafetensorError, OSError) as cause:
            raise CanvasError(
                f"cannot read {name} from {self.path / self._shards[found]}: {cause}",
                "the file is damaged; fetch or save the checkpoint again",
            ) from cause

    def _find(self, name: str) -> str | None:
        if name in self._shards:
            return name
        # The layer scalars are the exception: encoder and decoder have their own.
        if name.endswith("layer_scalar"):
            return None
        for ours, theirs in _ALIASES:
            alias = theirs + name[len(ours) :]
            if name.startswith(ours) and alias in self._shards:
                return alias
        return None

    def _index(self) -> dict[str, str]:
        """Tensor name → the file that holds it."""
        index, single = self.path / INDEX, self.path / SINGLE
        if index.is_file():
            try:
                shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError, TypeError) as cause:
                raise CanvasError(
                    f"{index} is not a safetensors index: {cause}", "fetch the checkpoint again"
                ) from cause
            return dict(shards)
        if single.is_file():
            return dict.fromkeys(self._open(single).keys(), SINGLE)
        raise CanvasError(
            f"{self.path} holds neither {SINGLE} nor {INDEX}",
            "give a folder in the Hugging Face layout with safetensors weights",
        )

    def _open(self, file: Path) -> safe_open:
        try:
            return safe_open(file, framework="pt")
        except FileNotFoundError as cause:
            raise CanvasError(
                f"{file} is missing, but {INDEX} names it", "fetch the checkpoint again"
            ) from cause
        except (SafetensorError, OSError) as cause:
            raise CanvasError(
                f"{file} is not a whole safetensors file: {cause}", "fetch the checkpoint again"
            ) from cause


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's values as little-endian bytes, without a copy when it is contiguous."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
