"""A checkpoint's metadata, read once from its small files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from canvasrt.checkpoints.config import ModelConfig, SamplerDefaults
from canvasrt.checkpoints.locate import find_checkpoint, fingerprint
from canvasrt.checkpoints.quantized import Quantization, quantization_of
from canvasrt.errors import CanvasError
from canvasrt.hashes import hash_files

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Description:
    """A checkpoint in a local folder. `quantization` is None for plain weights. `hashes` (file name → SHA-256) is None
    unless `hashed` returned this description."""

    folder: Path
    model: ModelConfig
    sampler: SamplerDefaults
    quantization: Quantization | None
    hashes: Mapping[str, str] | None = None

    @property
    def tokenizer(self) -> dict[str, Path]:
        """The tokenizer's files by name. The result is empty if tokenizer.json is missing."""
        found = {name: self.folder / name for name in _TOKENIZER_FILES}
        found = {name: file for name, file in found.items() if file.is_file()}
        return found if "tokenizer.json" in found else {}

    def check_plain(self) -> None:
        """Raise CanvasError if the weights are quantized: no adapter can be merged into them."""
        if self.quantization is not None:
            raise CanvasError(
                f"{self.folder} is quantized ({self.quantization.algorithm}), but adapters need plain weights",
                "give the bf16 checkpoint that the adapter was trained on; `canvasrt build --precision`"
                " quantizes it with the adapter merged",
            )

    def hashed(self, hasher: Callable[..., dict[str, str]] = hash_files) -> Description:
        """Return a copy of this description with the hashes of all files that affect a bundle."""
        return replace(self, hashes=fingerprint(self.folder, hasher))


def describe(name: str | Path) -> Description:
    """Describe a checkpoint. `name` is a folder, the name of a bundled checkpoint, or a hub name to download.

    Raises CanvasError if there is no such checkpoint, if its weights are incomplete, or if its architecture is not
    supported.
    """
    folder = find_checkpoint(name)
    quantization = quantization_of(folder)
    model, sampler = ModelConfig.from_checkpoint(folder)
    return Description(folder, model, sampler, quantization)
