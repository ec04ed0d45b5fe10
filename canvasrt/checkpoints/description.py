"""A checkpoint's metadata, read once from its small files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from canvasrt.checkpoints.config import ModelConfig, SamplerDefaults, read_config
from canvasrt.checkpoints.locate import find_checkpoint, read_files
from canvasrt.checkpoints.quantized import Quantization, quantization_of
from canvasrt.errors import CanvasError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Description:
    """A checkpoint in a local folder. `quantization` is None for plain weights. `tensors` are the names of its tensors.
    `hashes` is the result of `fingerprint`, or None until the files are hashed."""

    folder: Path
    model: ModelConfig
    sampler: SamplerDefaults
    quantization: Quantization | None
    tensors: frozenset[str] = frozenset()
    hashes: Mapping[str, str] | None = None

    @property
    def tokenizer(self) -> dict[str, Path]:
        """The tokenizer's files by name. The result is empty if tokenizer.json is missing."""
        found = {name: self.folder / name for name in _TOKENIZER_FILES}
        found = {name: file for name, file in found.items() if file.is_file()}
        return found if "tokenizer.json" in found else {}

    def check_plain(self) -> None:
        """Raise CanvasError if the weights are quantized, because adapters cannot be merged into quantized weights."""
        if self.quantization is not None:
            raise CanvasError(
                f"{self.folder} is quantized ({self.quantization.algorithm}), but adapters need plain weights",
                "give the bf16 checkpoint that the adapter was trained on; `canvasrt build --precision`"
                " quantizes it with the adapter merged",
            )


def describe(name: str | Path) -> Description:
    """Describe a checkpoint. `name` is a folder, the name of a bundled checkpoint, or a hub name to download.

    Raises CanvasError if there is no such checkpoint, if its weights are incomplete, or if its architecture is not
    supported.
    """
    files = read_files(find_checkpoint(name))
    quantization = quantization_of(files)
    model, sampler = read_config(files.config, files.generation, files.preprocessing)
    return Description(files.folder, model, sampler, quantization, files.tensors)
