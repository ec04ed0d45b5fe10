"""A build's options: what the user chooses, checked against the source and the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from canvasrt.build.source import Source
from canvasrt.calibration_prompts import check_calibration
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.locate import check_adapter
from canvasrt.defaults import LAYERS_PER_SEGMENT, MAX_BATCH, MAX_CONTEXT, SLOTTED
from canvasrt.errors import UsageError
from canvasrt.formats import FORMATS, PLAIN
from canvasrt.recipes.recipe import Recipe, is_path, load_recipe
from canvasrt.targets import Target, check_precision

# For each LoRA adapter, its folder and its factor.
Adapters = tuple[tuple[Path, float], ...]


@dataclass(frozen=True)
class BuildOptions:
    """The user's options. None means the default of the source or the target."""

    precision: str | None = None
    max_context: int | None = None
    max_batch: int = MAX_BATCH
    layers_per_segment: int | None = None
    calibration: Path | None = None
    adapters: Adapters = ()
    experts: str = SLOTTED
    keep_graphs: bool = False


DEFAULT_OPTIONS = BuildOptions()


@dataclass(frozen=True)
class Precision:
    """A precision, named as in the table of targets. If `recipe` is None, quantized weights of the source are kept."""

    name: str
    recipe: Recipe | None = None

    @property
    def is_quantized(self) -> bool:
        return self.name not in PLAIN

    @property
    def is_calibrated(self) -> bool:
        """Whether the precision needs calibration prompts."""
        if self.recipe is not None:
            return self.recipe.is_calibrated
        return self.is_quantized and FORMATS[self.name].rounds_inputs

    @property
    def exported(self) -> str:
        """The precision of graphs exported from a plain checkpoint."""
        return self.name if self.name in PLAIN else "bf16"

    @property
    def text(self) -> str:
        """The recipe's name if there is a recipe, else the precision's name."""
        return self.recipe.name if self.recipe else self.name

    def formats(self, model: ModelConfig) -> dict[str, str] | None:
        """Return the quantized weights' formats by global name; None if only the source knows them."""
        if self.recipe is None:
            return None if self.is_quantized else {}
        return {name: choice.format for name, choice in self.recipe.formats(model).items()}


def parse_precision(requested: str) -> Precision:
    """Parse `fp32`, `bf16`, a recipe's name or a recipe file. Raises UsageError for an unknown name."""
    if requested in PLAIN:
        return Precision(requested)
    try:
        recipe = load_recipe(requested)
    except UsageError as error:
        if is_path(requested):
            raise
        raise UsageError(
            f"unknown precision {requested!r}", f"give {' or '.join(PLAIN)}, or {error.hint}"
        ) from None
    return Precision(recipe.precision, recipe)


def choose_precisions(
    targets: Sequence[Target], requested: str | None, of_source: str | None
) -> list[Precision]:
    """Choose every target's precision.

    `of_source` is the precision of graphs or of a quantized checkpoint; None for a plain checkpoint. If `requested` is
    None, a target that supports the source's precision gets it, and any other target gets its own default. A CPU that
    does not support `requested` gets its default if another target supports `requested`.
    """
    if requested is None:
        return [_default(target, of_source) for target in targets]
    wanted = parse_precision(requested)
    shared = any(wanted.name in target.precisions for target in targets)
    chosen = []
    for target in targets:
        if shared and target.capability is None and wanted.name not in target.precisions:
            chosen.append(_default(target, None))
            continue
        _check(target, wanted, several=len(targets) > 1)
        # A source that already has the requested precision is built unchanged.
        named = requested == wanted.name and of_source == wanted.name
        chosen.append(Precision(wanted.name) if named else wanted)
    return chosen


def _default(target: Target, of_source: str | None) -> Precision:
    if of_source in target.precisions:
        return Precision(str(of_source))
    return parse_precision(target.default)


def _check(target: Target, wanted: Precision, several: bool) -> None:
    if several and wanted.name not in target.precisions:
        raise UsageError(
            f"{target.name} does not support precision {wanted.name!r}",
            f"leave out --precision to give each target its default ({target.name}:"
            f" {target.default}), or build {target.name} separately",
        )
    check_precision(target, wanted.name)
    if wanted.recipe is not None and not wanted.recipe.suits(target):
        raise UsageError(
            f"the recipe {wanted.recipe.name!r} is not for {target.name}",
            f"give --precision {target.default}, or one of the recipe's targets:"
            f" {', '.join(wanted.recipe.targets)}",
        )


def check_options(
    options: BuildOptions, source: Source, precisions: Sequence[Precision]
) -> tuple[int, int]:
    """Check options against the source and the targets' precisions. Return the context length and the number of layers
    per segment, as requested, or else the source's defaults."""
    ends = source.graphs is not None and source.is_quantized
    is_calibrated = not ends and any(each.is_calibrated for each in precisions)
    what = "a graph bundle that is already quantized" if ends else precisions[0].text
    check_calibration(options.calibration, is_calibrated, what)
    if options.max_batch < 1:
        raise UsageError(f"--max-batch {options.max_batch} is less than 1", "give 1 or more")
    _check_adapters(source, options.adapters)
    return _context(source, options.max_context), _layers(source, options.layers_per_segment)


def _check_adapters(source: Source, adapters: Adapters) -> None:
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


def _context(source: Source, requested: int | None) -> int:
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


def _layers(source: Source, requested: int | None) -> int:
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
