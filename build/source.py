"""What a build starts from: a checkpoint, or graphs that were exported (and perhaps quantized) from one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvasrt import checkpoints
from canvasrt.build.cache import hash_memo, load_checked
from canvasrt.build.precision import PLAIN
from canvasrt.bundle import MANIFEST, Bundle, load_bundle
from canvasrt.model import ModelConfig
from canvasrt.progress import Progress, no_progress
from canvasrt.quantization import quantization_of


@dataclass(frozen=True)
class Source:
    """A checkpoint (`graphs` None) or a graph bundle; `made_from` holds its hashes.

    `precision` is that of graphs, or of a checkpoint that is quantized already; None for one of plain weights.
    """

    path: Path
    model: ModelConfig
    made_from: dict[str, Any]
    graphs: Bundle | None = None
    precision: str | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the weights have been quantized by someone."""
        return self.precision is not None and self.precision not in PLAIN

    @property
    def formats(self) -> dict[str, str] | None:
        """The format of each weight that graphs have quantized, by global name; None where it is not known."""
        if self.graphs is None:
            return None
        entries = self.graphs.manifest.segments
        return {name: form for entry in entries for name, form in _quantized(entry).items()}


def read_source(source: Path | str, progress: Progress | None = None) -> Source:
    """Open a checkpoint or a graph bundle and hash it, once for all targets."""
    report = progress or no_progress
    path = Path(source).expanduser()
    if (path / MANIFEST).exists():
        bundle = load_checked(
            path, "graphs", lambda done, total: report("checking graphs", done, total)
        )
        made_from = {"kind": "graphs", "digest": bundle.manifest.digest}
        return Source(path, bundle.manifest.model, made_from, bundle, precision_of(bundle))
    folder = checkpoints.resolve(str(source))
    model, _ = ModelConfig.from_checkpoint(folder)
    hashes = checkpoints.fingerprint(
        folder,
        lambda done, total: report("hashing the checkpoint", done, total),
        hash_memo().hash_files,
    )
    return Source(
        folder, model, {"kind": "checkpoint", "files": hashes}, None, checkpoint_precision(folder)
    )


def source_precision(source: Path | str) -> str | None:
    """A source's precision, read from its manifest or configuration alone; None for a checkpoint of plain weights."""
    path = Path(source).expanduser()
    if (path / MANIFEST).exists():
        return precision_of(load_bundle(path, kind="graphs", check=False))
    return checkpoint_precision(checkpoints.resolve(str(source)))


def precision_of(graphs: Bundle) -> str:
    """What a graph bundle's weights are."""
    return graphs.manifest.options.get("precision", "fp32")


def checkpoint_precision(folder: Path) -> str | None:
    """What a checkpoint's weights were quantized to by who made it; None when they are plain."""
    found = quantization_of(folder)
    return None if found is None else found.precision


def _quantized(entry: dict[str, Any]) -> dict[str, str]:
    return entry.get("quantized") or {}
