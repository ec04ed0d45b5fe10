"""A build's source: a checkpoint, or graphs that were exported (and possibly quantized) from one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from canvasrt.bundle import MANIFEST, Bundle, load_bundle
from canvasrt.cache import known_hashes
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.description import Description, describe
from canvasrt.checkpoints.locate import fingerprint
from canvasrt.checkpoints.weight_names import DECODER, DOWN, ENCODER, GATE_UP, TABLE, matrices
from canvasrt.formats import FORMATS, PLAIN
from canvasrt.recipes.recipe import load_recipe

# A tensor that only a quantized weight has → the weight's format.
_PARTS = {"weight_packed": "int4", "weight_scale_2": "nvfp4", "weight_scale": "fp8"}


@dataclass(frozen=True)
class Source:
    """A checkpoint, described by `checkpoint`, or the graph bundle `graphs`. `made_from` has the source's hashes.

    `precision` is the precision of the graphs or of a quantized checkpoint; None for a plain checkpoint.
    """

    path: Path
    model: ModelConfig
    made_from: dict[str, Any]
    graphs: Bundle | None = None
    precision: str | None = None
    checkpoint: Description | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are already quantized."""
        return self.precision is not None and self.precision not in PLAIN

    @cached_property
    def formats(self) -> dict[str, str] | None:
        """The formats of quantized weights by global name; None for a plain checkpoint."""
        if self.graphs is not None:
            entries = self.graphs.manifest.segments
            return {
                n: form for each in entries for n, form in (each.get("quantized") or {}).items()
            }
        found = self.checkpoint
        return _stored_formats(found, str(self.precision)) if found and self.precision else None


def _stored_formats(checkpoint: Description, precision: str) -> dict[str, str]:
    """Derive, from a quantized checkpoint's tensor names, the formats that its weights will have in graphs."""
    model, found = checkpoint.model, dict[str, str]()
    names = {each.replace(ENCODER, DECODER) for each in checkpoint.tensors}
    for name, matrix in matrices(model).items():
        module = matrix.tensors[0].removesuffix(".weight")
        if name.endswith((GATE_UP, DOWN)):  # the checkpoint stores every expert separately
            module = module.replace("experts.", "experts.0.").replace("gate_up", "gate")
        formats = [format for part, format in _PARTS.items() if f"{module}.{part}" in names]
        if formats:
            found[name] = formats[0]
    table = load_recipe(precision).formats(model).get(TABLE)
    if table and not FORMATS[table.format].rounds_inputs:  # as in export/prequantized.py
        found.setdefault(TABLE, table.format)
    return found


def find_source(source: Path | str) -> Source:
    """Find a checkpoint or a graph bundle, and read only its metadata.

    `made_from` is empty until `hash_source` fills it in.
    """
    path = Path(source).expanduser()
    if (path / MANIFEST).exists():
        bundle = load_bundle(path, kind="graphs", check=False)
        precision = bundle.manifest.options.get("precision", "fp32")
        return Source(path, bundle.manifest.model, {}, bundle, precision)
    found = describe(str(source))
    precision = found.quantization.precision if found.quantization else None
    return Source(found.folder, found.model, {}, None, precision, found)


def hash_source(source: Source) -> Source:
    """Hash the source, and return it with `made_from` filled in. Raises CanvasError if a graph bundle is damaged."""
    if source.graphs is not None:
        graphs = load_bundle(source.path, kind="graphs", hasher=known_hashes)
        made_from = {"kind": "graphs", "digest": graphs.manifest.digest}
        return replace(source, graphs=graphs, made_from=made_from)
    assert source.checkpoint is not None
    files = fingerprint(source.checkpoint.folder, known_hashes)
    checkpoint = replace(source.checkpoint, hashes=files)
    return replace(source, checkpoint=checkpoint, made_from={"kind": "checkpoint", "files": files})
