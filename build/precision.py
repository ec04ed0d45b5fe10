"""The precision of a build's weights: a plain number format, or a quantization recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import UsageError
from canvasrt.formats import FORMATS, PLAIN
from canvasrt.recipes.recipe import Recipe, is_path, load_recipe
from canvasrt.targets import Target, check_precision


@dataclass(frozen=True)
class Precision:
    """A precision, named as in the table of targets. Without a recipe, a source's quantized weights are kept."""

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
