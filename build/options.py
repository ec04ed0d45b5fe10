"""A build's options, and checks of options against the source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from canvasrt.build.source import Source
from canvasrt.checkpoints.locate import check_adapter
from canvasrt.defaults import (
    LAYERS_PER_SEGMENT,
    MAX_BATCH,
    MAX_CONTEXT,
    SLOTTED,
)
from canvasrt.errors import UsageError

# For each LoRA adapter, its folder and its factor.
Adapters = tuple[tuple[Path, float], ...]


@dataclass(frozen=True)
class BuildOptions:
    """The user's options. None stands for the default of the source or the target."""

    precision: str | None = None
    max_context: int | None = None
    max_batch: int = MAX_BATCH
    layers_per_segment: int | None = None
    calibration: Path | None = None
    adapters: Adapters = ()
    experts: str = SLOTTED
    keep_graphs: bool = False


DEFAULT_OPTIONS = BuildOptions()


def check_adapters(source: Source, adapters: Adapters) -> None:
    """Raise CanvasError for a folder without an adapter, or if the source cannot be adapted."""
    for path, _ in adapters:
        check_adapter(path)
    if adapters and source.graphs is not None:
        raise UsageError(
            f"{source.path} holds graphs, but --adapter merges into a checkpoint",
            "build from the checkpoint that the adapter was trained on",
        )
    if adapters and source.checkpoint is not None:
        source.checkpoint.check_plain()


def check_context(source: Source, requested: int | None) -> int:
    """Check and return `--max-context`. If the option is left out, return the smaller of the model's limit and our
    default."""
    model = source.model
    limit = model.max_position_embeddings
    context = min(limit, MAX_CONTEXT) if requested is None else requested
    if context > limit:
        raise UsageError(
            f"--max-context {context} is more than the model's {limit} positions",
            f"give at most {limit}",
        )
    if context <= model.canvas_length:
        raise UsageError(
            f"--max-context {context} leaves no room for a prompt next to one canvas of"
            f" {model.canvas_length} tokens",
            f"give at least {model.canvas_length + 1}",
        )
    return context


def check_layers(source: Source, requested: int | None) -> int:
    """Check and return `--layers-per-segment`. Exported graphs allow only the number with which they were exported."""
    if requested is not None and requested < 1:
        raise UsageError(f"--layers-per-segment {requested} is less than 1", "give 1 or more")
    if source.graphs is None:
        return requested or LAYERS_PER_SEGMENT
    cut = source.graphs.manifest.options.get("layers_per_segment", LAYERS_PER_SEGMENT)
    if requested not in (None, cut):
        raise UsageError(
            f"{source.path} holds graphs of {cut} layers each, but --layers-per-segment is {requested}",
            "build from the checkpoint, or leave the option out",
        )
    return cut
