"""Quantization recipes: YAML files that define the weights' formats, the calibration, and limits on the loss of
quality.

`README.md` in this folder explains how to write one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.weight_names import TABLE, matrices, norms
from canvasrt.errors import CanvasError, UsageError
from canvasrt.formats import FORMATS, most_demanding
from canvasrt.recipes import SHIPPED
from canvasrt.recipes.fields import Fields, read_yaml
from canvasrt.targets import TARGETS, Target, find_target
from canvasrt.types import Json

Scales = Literal["per_tensor", "per_channel"]
Method = Literal["max", "mse"]

RECIPE_SCHEMA = 1
_CACHES = (None, *(each.name for each in FORMATS.values() if each.caches))
_README = "canvasrt/recipes/README.md shows how a recipe is written"


@dataclass(frozen=True)
class Choice:
    """How one weight is quantized.

    Attributes:
        format: a name in the table of number formats.
        weights: whether there is one scale per matrix, or one per output. Formats with blocks ignore this.
        method: how scales are chosen.
    """

    format: str
    weights: Scales = "per_tensor"
    method: Method = "max"


@dataclass(frozen=True)
class Rule:
    """A choice for the weights that match a pattern."""

    pattern: str
    choice: Choice


@dataclass(frozen=True)
class Exclusion:
    """A pattern of weights that keep the graph's precision, and the reason."""

    pattern: str
    why: str


@dataclass(frozen=True)
class CalibrationSettings:
    """How a model is calibrated.

    Attributes:
        prompts: the maximum number of lines of the calibration file to use.
        max_new_tokens: the maximum number of tokens to generate per prompt; None means the checkpoint's default.
        all_steps: the share of prompts, from 0 to 1, whose blocks take all denoising steps. The blocks of the
        remaining prompts stop early, as in serving.
        seed: prompt i is generated with `seed + i`.
    """

    prompts: int = 512
    max_new_tokens: int | None = None
    all_steps: float = 0.25
    seed: int = 0


@dataclass(frozen=True)
class Limits:
    """Limits on how much worse than its reference a quantized model may be. A limit of None is not checked.

    Attributes:
        answers_lost: the number of right answers lost per 100 questions.
        steps_growth: growth of the denoising steps per block; 0.1 means 10% more steps.
        kl_mean, kl_p99: the mean and the 99th percentile of the logits' KL divergence, in nats.
        argmax_agreement: the smallest allowed share of positions where both models have the same best token.
    """

    answers_lost: float | None = None
    steps_growth: float | None = None
    kl_mean: float | None = None
    kl_p99: float | None = None
    argmax_agreement: float | None = None


@dataclass(frozen=True)
class Recipe:
    """One recipe. `source` is the file that error messages name; comparisons of recipes ignore it."""

    name: str
    description: str
    rules: tuple[Rule, ...]
    excluded: tuple[Exclusion, ...] = ()
    kv_cache: str | None = None
    calibration: CalibrationSettings = CalibrationSettings()
    limits: Limits = Limits()
    targets: tuple[str, ...] = ()
    source: str = field(default="", compare=False)

    @property
    def precision(self) -> str:
        """The most demanding format in the rules. A target must list this format in its `precisions`."""
        return most_demanding({rule.choice.format for rule in self.rules})

    @property
    def is_calibrated(self) -> bool:
        """Whether scales of inputs or of the cache must be calibrated with prompts."""
        formats = {rule.choice.format for rule in self.rules}
        return self.kv_cache is not None or any(FORMATS[name].rounds_inputs for name in formats)

    def suits(self, target: Target) -> bool:
        """Return whether the recipe supports a target. Every recipe supports a CPU, because graphs for a CPU dequantize
        the formats that it cannot multiply."""
        return target.capability is None or target.name in self.targets

    def formats(self, config: ModelConfig) -> dict[str, Choice]:
        """Return global name → choice for every quantized weight, in the model's order.

        If several rules match, the last one applies; exclusions override rules. Raises CanvasError if a pattern matches
        no weight, if a weight cannot be quantized as its rule demands, or if no weight would be quantized.
        """
        widths = quantizable(config)
        everything = [*widths, *_unquantizable(config)]
        patterns = [rule.pattern for rule in self.rules]
        for pattern in patterns + [each.pattern for each in self.excluded]:
            if not any(fnmatchcase(name, pattern) for name in everything):
                raise self._wrong(
                    f"{pattern!r} matches no weight of this model",
                    f"weights are named {', '.join(_examples(config))}",
                )
        chosen: dict[str, Choice] = {}
        for name in everything:
            choice = self._choice(name)
            if choice is None:
                continue
            if name not in widths:
                raise self._wrong(f"{name} cannot be quantized", _unquantizable(config)[name])
            format, width = FORMATS[choice.format], widths[name]
            able = [each for each in FORMATS.values() if each.quantizes(name == TABLE)]
            if format not in able:
                raise self._wrong(
                    f"{name} cannot be quantized to {format.name}",
                    f"give it the format {' or '.join(each.name for each in able)}, or exclude it",
                )
            if not format.divides(width):
                fitting = " or ".join(each.name for each in able if each.divides(width))
                raise self._wrong(
                    f"{name} has rows of {width}, but {format.name} has {format.blocks_text}",
                    f"exclude it, or in a later rule give it a format that the target has: {fitting}",
                )
            if name == TABLE and (choice.weights, choice.method) != ("per_tensor", "max"):
                raise self._wrong(
                    f"{name} has scales: {choice.weights} and method: {choice.method}",
                    "leave both out: the table has one scale, because one of its two products sums over the vocabulary",
                )
            chosen[name] = choice
        if not chosen:
            raise self._wrong(
                "quantizes nothing, because everything that its rules match is excluded",
                "take something out of `excluded`, or build with --precision bf16",
            )
        return chosen

    def to_json(self) -> Json:
        """Return the recipe in the form of its file, including every default."""
        return {
            "schema": RECIPE_SCHEMA,
            "name": self.name,
            "description": self.description,
            "quantize": [
                {
                    "weights": rule.pattern,
                    "format": rule.choice.format,
                    "scales": rule.choice.weights,
                    "method": rule.choice.method,
                }
                for rule in self.rules
            ],
            "excluded": [{"weights": each.pattern, "why": each.why} for each in self.excluded],
            "kv_cache": self.kv_cache,
            "calibration": asdict(self.calibration),
            "limits": asdict(self.limits),
            "targets": list(self.targets),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str = "recipe") -> Recipe:
        """Read a parsed document. The message of a CanvasError names `source`, the key and the expected value."""
        document = Fields(data, source, _README)
        schema = document.take("schema", None)
        if schema != RECIPE_SCHEMA:
            raise document.wrong("schema", str(RECIPE_SCHEMA), schema)
        recipe = cls(
            name=document.text("name"),
            description=document.text("description"),
            rules=tuple(
                Rule(pattern, _choice(item))
                for item in document.items("quantize")
                for pattern in item.texts("weights")
            ),
            excluded=tuple(
                Exclusion(pattern, item.text("why"))
                for item in document.items("excluded", required=False)
                for pattern in item.texts("weights")
            ),
            kv_cache=document.one_of("kv_cache", _CACHES, None),
            calibration=_calibration(document.fields("calibration")),
            limits=_limits(document.fields("limits")),
            source=document.where,
        )
        named = document.texts("targets", required=False)
        document.finish()
        return replace(recipe, targets=_targets(recipe, named))

    def _choice(self, name: str) -> Choice | None:
        if any(fnmatchcase(name, each.pattern) for each in self.excluded):
            return None
        found = [rule.choice for rule in self.rules if fnmatchcase(name, rule.pattern)]
        return found[-1] if found else None

    def _wrong(self, message: str, hint: str) -> CanvasError:
        return CanvasError(f"{self.source or self.name}: {message}", hint)


def is_path(name_or_path: str | Path) -> bool:
    """Return whether a recipe argument is a file's path rather than a recipe's name. The file need not exist."""
    path = Path(name_or_path)
    return len(path.parts) > 1 or path.suffix in (".yaml", ".yml")


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Load one of canvasrt's recipes by its name, or a user's recipe by its path.

    Raises UsageError for an unknown name or a missing file, and CanvasError for a file that cannot be read or does not
    fit the schema.
    """
    shipped = SHIPPED.get(str(name_or_path))
    file = shipped or Path(name_or_path).expanduser()
    if shipped is None and not file.is_file():
        known = f"canvasrt's recipes: {', '.join(SHIPPED)}"
        if is_path(name_or_path):
            raise UsageError(
                f"recipe file {name_or_path} does not exist",
                f"check the path, or give one of {known}",
            )
        raise UsageError(
            f"unknown recipe {str(name_or_path)!r}",
            f"give one of {known}; or the path of a YAML file",
        )
    source = str(name_or_path) if shipped is None else f"recipe {name_or_path}"
    return Recipe.from_json(read_yaml(file, _README), source)


def quantizable(config: ModelConfig) -> dict[str, int]:
    """Return global name → width of the input, for every weight that has a quantized form."""
    return {name: each.width for name, each in matrices(config).items()}


def _unquantizable(config: ModelConfig) -> dict[str, str]:
    """Return global name → reason, for every weight that no recipe can quantize."""
    return {
        **dict.fromkeys(norms(config), "norms are not matrix products: exclude them"),
        "vision": "the vision tower runs once per prompt and has no quantized form: exclude it",
    }


def _examples(config: ModelConfig) -> list[str]:
    """Return the names of the weights in the first layer and outside the layers."""
    first = "layers.0."
    return [
        name
        for name in (*quantizable(config), "vision")
        if name.startswith(first) or not name.startswith("layers.")
    ]


def _choice(item: Fields) -> Choice:
    format = FORMATS[item.one_of("format", tuple(FORMATS))]
    scales = item.one_of("scales", ("per_tensor", "per_channel"), "per_tensor")
    method = item.one_of("method", ("max", "mse"), "max")
    item.allow("weights", "why")
    item.finish()
    if format.blocks and scales == "per_channel":
        raise item.wrong("scales", f"left out ({format.name} has {format.blocks_text})", scales)
    return Choice(format.name, scales, method)


def _calibration(found: Fields) -> CalibrationSettings:
    base = CalibrationSettings()
    settings = CalibrationSettings(
        prompts=found.integer("prompts", base.prompts, 1),
        max_new_tokens=found.optional_integer("max_new_tokens", 1),
        all_steps=found.number("all_steps", base.all_steps, 0, 1) or 0.0,
        seed=found.integer("seed", base.seed, 0),
    )
    found.finish()
    return settings


def _limits(found: Fields) -> Limits:
    most = {"answers_lost": 100.0, "argmax_agreement": 1.0}
    limits = {
        name: found.number(name, None, 0, most.get(name, math.inf)) for name in asdict(Limits())
    }
    found.finish()
    return Limits(**limits)


def _targets(recipe: Recipe, named: list[str]) -> tuple[str, ...]:
    """Return the targets that a recipe names; if it names none, all targets that support its formats."""
    formats = [recipe.precision, *([recipe.kv_cache] if recipe.kv_cache else [])]
    able = [target.name for target in TARGETS if {*formats} <= {*target.precisions}]
    for name in named:
        target = find_target(name)
        if target.capability is not None and name not in able:
            lacks = next(each for each in formats if each not in target.precisions)
            raise recipe._wrong(
                f"targets lists {name}, which does not support {lacks}",
                f"targets that support {' and '.join(formats)}: {', '.join(able)}",
            )
    return tuple(named or able)
