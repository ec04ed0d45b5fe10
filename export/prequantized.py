"""Finds a checkpoint's quantized weights, copies their codes to graphs, and describes them for the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.quantized import Quantization
from canvasrt.checkpoints.weight_names import TABLE, global_name
from canvasrt.errors import CanvasError
from canvasrt.export.checkpoint import Checkpoint, bytes_of
from canvasrt.export.compressed_tensors import Int4Codes, TableCodes, read_int4
from canvasrt.export.modelopt import StoredCodes, read_codes
from canvasrt.export.onnx import IR_DTYPES
from canvasrt.export.quantize.quantizers import form_of
from canvasrt.export.segments import SegmentModule
from canvasrt.export.weights import Weight, weights
from canvasrt.formats import FORMATS
from canvasrt.graphs.external import Stored
from canvasrt.graphs.packed import Form
from canvasrt.recipes import SHIPPED
from canvasrt.recipes.recipe import (
    Choice,
    Exclusion,
    Recipe,
    Rule,
    load_recipe,
    quantizable,
)


class Prequantized:
    """The quantized weights of a checkpoint."""

    def __init__(
        self,
        how: Quantization,
        parts: Sequence[SegmentModule],
        source: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        packs: bool,
    ) -> None:
        """Find the quantized weights, and check their scales.

        Args:
            dtype: the dtype of unquantized weights in the graphs.
            packs: whether codes are copied to the graphs. Otherwise all weights are dequantized. Weights that have no
            quantized form in graphs, such as the vision tower's, are always dequantized.
        """
        self._how, self._config, self._dtype = how, config, dtype
        # By global name: the weights that the checkpoint stores quantized, and the table if graphs quantize it.
        self.held: dict[str, StoredCodes | Int4Codes | TableCodes] = {}
        rounded = load_recipe(how.precision).formats(config).get(TABLE) if packs else None
        # Checkpoints have no input scales for the table, so the table cannot have a format that needs them.
        if rounded is not None and FORMATS[rounded.format].rounds_inputs:
            rounded = None
        for part in parts:
            for weight in weights(part.module, part.sources, source):
                name = global_name(part.name, part.layers, weight.name)
                found = read_int4(weight) or read_codes(weight)
                if found is not None:
                    self.held[name] = found
                elif rounded is not None and name == TABLE:
                    weight.check()
                    self.held[name] = TableCodes(weight, form_of(weight.shape, rounded.format))
        able = quantizable(config)
        # The part of `held` whose codes are copied to graphs.
        self.packed = {name: codes for name, codes in self.held.items() if packs and name in able}
        if not set(self.held) - {TABLE} or (packs and not set(self.packed) - {TABLE}):
            raise CanvasError(
                f"{source.path} declares {how.algorithm}, but has no quantized weights",
                "fetch the checkpoint again, or remove the quantization from its configuration",
            )

    @property
    def static(self) -> bool:
        """Whether the checkpoint has every input scale that the graphs need."""
        return all(codes.is_complete for codes in self.packed.values())

    @property
    def recipe(self) -> Recipe:
        """The checkpoint's quantization as a recipe."""
        forms = {name: codes.form for name, codes in self.packed.items()}
        return _recipe(self._how, forms, self._config)

    def options(self) -> dict[str, Any]:
        """Return the manifest's options."""
        return {"checkpoint_quantization": self._how.to_json()}

    def holds(self, part: SegmentModule, weight: Weight) -> bool:
        """Return whether a weight of a graph is in `held`."""
        return global_name(part.name, part.layers, weight.name) in self.held

    def widened(self, part: SegmentModule, items: Iterable[Weight]) -> Iterator[Weight | Stored]:
        """Yield a graph's weights. Dequantize a weight that the checkpoint quantizes but the graph does not."""
        for item in items:
            name = global_name(part.name, part.layers, item.name)
            widens = name in self.held and name not in self.packed
            yield self._widened(item, self.held[name]) if widens else item

    def _widened(self, weight: Weight, held: StoredCodes | Int4Codes | TableCodes) -> Stored:
        def read() -> Iterator[memoryview]:
            return (bytes_of(part.to(self._dtype)) for part in held.wide())

        return Stored(weight.name, IR_DTYPES[self._dtype], weight.shape, read)


def _recipe(how: Quantization, forms: Mapping[str, Form], config: ModelConfig) -> Recipe:
    """Return the checkpoint's quantization as a recipe.

    If one of canvasrt's recipes quantizes the same weights to the same formats, the result has that recipe's name and
    limits. `forms` are the quantized weights' forms by global name.
    """
    choices = {
        name: Choice(form.format, "per_channel" if _by_channel(form) else "per_tensor")
        for name, form in forms.items()
    }
    same = [recipe for recipe in map(load_recipe, SHIPPED) if _agree(recipe, forms, config)]
    base = same[0] if same else load_recipe(how.precision)
    rest = [name for name in quantizable(config) if name not in forms]
    return Recipe(
        name=base.name if same else f"{how.precision}-checkpoint",
        description=f"As in the checkpoint: {how.algorithm}, written by {how.producer}.",
        rules=tuple(
            Rule(pattern, choice)
            for choice in dict.fromkeys(choices.values())
            for pattern in _patterns([n for n in choices if choices[n] == choice], config)
        ),
        excluded=tuple(
            Exclusion(pattern, "not quantized in the checkpoint")
            for pattern in _patterns(rest, config)
        ),
        limits=base.limits,
        targets=load_recipe(how.precision).targets,
    )


def _by_channel(form: Form) -> bool:
    format = FORMATS[form.format]
    if format.blocks or format.of_table:  # no recipe chooses their scales
        return False
    return bool(form.scale_shape or (form.factor_shape or (1,))[-1] > 1)


def _agree(recipe: Recipe, forms: Mapping[str, Form], config: ModelConfig) -> bool:
    try:
        wanted = recipe.formats(config)
    except CanvasError:  # the format does not support the width of a weight
        return False
    return {name: choice.format for name, choice in wanted.items()} == {
        name: form.format for name, form in forms.items()
    }


def _patterns(names: list[str], config: ModelConfig) -> list[str]:
    """Return patterns that match the names: one pattern for each weight that every layer has, and all other names
    unchanged."""
    found: dict[str, list[str]] = {}
    for name in names:
        first, _, rest = name.partition(".")
        kind = f"layers.*.{rest.partition('.')[2]}" if first == "layers" else name
        found.setdefault(kind, []).append(name)
    whole = len(config.layers)
    return [
        pattern
        for kind, each in found.items()
        for pattern in ([kind] if len(each) == whole else each)
    ]
