"""Plans builds: what a build writes, what it needs, and which inputs determine its results."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from canvasrt.build.calibration_needs import CalibrationNeeds, calibration_needs, prompts_of
from canvasrt.build.expert_forms import SLOTS, Experts, find_experts
from canvasrt.build.memory import Estimate, Weights, estimate
from canvasrt.build.needs import Needs, builder_needs, builders_at_once, host_needs
from canvasrt.build.options import (
    DEFAULT_OPTIONS,
    Adapters,
    BuildOptions,
    Precision,
    check_options,
    choose_precisions,
    parse_precision,
)
from canvasrt.build.source import Source
from canvasrt.bundle import Bundle
from canvasrt.cache import EXPORTED_BY, QUANTIZED_BY, versions
from canvasrt.calibration_prompts import CalibrationPrompts, work_of
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.weight_names import DOWN, GATE_UP
from canvasrt.defaults import (
    ADAPTER_FILES,
    LAYERS_PER_SEGMENT,
    MUCH_TO_BUILD,
    PREFILL_CHUNK,
    SHORT_SEGMENT,
    SLOTTED,
)
from canvasrt.errors import CanvasError
from canvasrt.hashes import hash_files
from canvasrt.pass_shapes import PassPlan, plan_passes
from canvasrt.recipes.recipe import load_recipe
from canvasrt.targets import Target
from canvasrt.types import Json


class PrefillPlan(NamedTuple):
    """How prompts are encoded: the most tokens of an encoding pass, and whether images are supported."""

    prefill_chunk: int
    sees: bool


@dataclass(frozen=True)
class Plan:
    """One engine bundle to build.

    `calibration` is a file of prompts, which only some recipes need. `adapters` are merged into the checkpoint.
    """

    source: Source
    target: Target
    precision: Precision
    max_context: int
    max_batch: int
    out: Path
    layers_per_segment: int = LAYERS_PER_SEGMENT
    calibration: Path | None = None
    adapters: Adapters = ()
    experts: Experts = SLOTS
    keep_graphs: bool = False

    @property
    def spends_graphs(self) -> bool:
        """Whether the weights in a segment's graph are removed from the cache once its engine is built. They are kept
        if they are small, if the source is a graph bundle, if the user wants to keep them, if engines link to them, or
        if sorted experts need them."""
        copies = self.target.capability is not None or self.precision.is_quantized
        ours = self.source.graphs is None and copies
        large = self.needs.graphs > KEPT_GRAPHS
        return ours and large and self.experts.in_engines and not self.keep_graphs

    @cached_property
    def options(self) -> dict[str, Any]:
        """The user's choices, as `options` in the manifest. Values equal to those in `DEFAULT_VALUES` are left out."""
        chosen: dict[str, Any] = {
            "precision": self.precision.name,
            "max_context": self.max_context,
            "max_batch": self.max_batch,
            "layers_per_segment": self.layers_per_segment,
        }
        sees = self.reading.sees or not self.source.model.vision
        rest = {
            "prefill_chunk": self.reading.prefill_chunk,
            "vision": sees,
            "experts": self.experts.name,
            "recipe": self.precision.recipe and self.precision.recipe.to_json(),
            "calibration": self.calibration_hash,
            "adapters": self.adapter_hashes,
        }
        return chosen | {n: value for n, value in rest.items() if value != DEFAULT_VALUES.get(n)}

    @cached_property
    def adapter_hashes(self) -> list[dict[str, Any]]:
        """For each adapter, its files' SHA-256 and its factor, as in the graphs' manifest."""
        return [
            {"files": hash_files(path, ADAPTER_FILES), "weight": weight}
            for path, weight in self.adapters
        ]

    @cached_property
    def calibration_hash(self) -> str | None:
        """The SHA-256 of the user's calibration file; None without a file, or if the precision needs no prompts."""
        if self.calibration is None or not self.precision.is_calibrated:
            return None
        return hash_files(self.calibration.parent, [self.calibration.name])[self.calibration.name]

    @cached_property
    def exported_precision(self) -> str:
        """The precision of the exported graphs. If the plan requests the precision in which the source is already
        quantized, the graphs keep it. Otherwise, the graphs are plain."""
        same = self.source.is_quantized and self.precision.name == self.source.precision
        return self.precision.name if same else self.precision.exported

    @cached_property
    def exported_from(self) -> Json:
        """The cache key of exported graphs: all inputs that determine them."""
        # The activation scales of a quantized checkpoint can come from calibration.
        own = self.calibration_hash if self.source.is_quantized else None
        return {
            **self.source.made_from,
            "precision": self.exported_precision,
            "layers_per_segment": self.layers_per_segment,
            "adapters": self.adapter_hashes,
            "calibration": own,
            "made_by": versions(EXPORTED_BY, "export"),
        }

    @cached_property
    def graphs_from(self) -> Json:
        """The cache key of the graphs from which engines are built: all inputs that determine them."""
        recipe = self.precision.recipe
        if not self.quantizes or recipe is None:
            return self.exported_from
        return {
            "graphs": self.source.made_from if self.source.graphs else self.exported_from,
            "recipe": recipe.to_json(),
            "calibration": self.calibration_hash,
            "made_by": versions(QUANTIZED_BY, "export", "runtime"),
        }

    @cached_property
    def calibration_work(self) -> Json | None:
        """All inputs that determine the calibration (see `work_of`); None if the build does not quantize."""
        source, recipe = self.source, self.precision.recipe
        if not self.quantizes or recipe is None:
            return None
        if source.graphs is not None:
            made_from: Json = {"graphs": source.graphs.manifest.digest, "known": None}
        else:
            adapters = {"adapters": self.adapter_hashes} if self.adapters else {}
            made_from = {"checkpoint": source.made_from | adapters}
        return work_of(made_from, recipe, self.prompts)

    @property
    def quantization_work(self) -> Json | None:
        """All inputs that determine unfinished quantized graphs; None if the build does not quantize."""
        cut = {"layers_per_segment": self.layers_per_segment} if self.source.graphs is None else {}
        return self.calibration_work and self.calibration_work | cut

    @cached_property
    def formats(self) -> dict[str, str] | None:
        """The quantized weights' formats by global name; None if only the source's precision is known."""
        if self.precision.recipe is None and self.precision.is_quantized:
            return self.source.formats
        return self.precision.formats(self.source.model)

    @property
    def expert_formats(self) -> set[str]:
        """The formats of the experts' weights."""
        found = self.formats or {}
        return {each for name, each in found.items() if name.endswith((GATE_UP, DOWN))}

    @property
    def kv_cache(self) -> str | None:
        """The key-value cache's format, from the requested recipe, or else from the graphs' recipe."""
        if self.precision.recipe is not None:
            return self.precision.recipe.kv_cache
        graphs = self.source.graphs
        made_with = graphs.manifest.options.get("recipe") if graphs else None
        return (made_with or {}).get("kv_cache")

    @property
    def quantizes(self) -> bool:
        """Whether the build quantizes weights that are not already quantized."""
        return self.precision.is_quantized and not self.source.is_quantized

    @property
    def given_graphs(self) -> Bundle | None:
        """The source's graphs, if engines are built from them as they are."""
        return None if self.quantizes else self.source.graphs

    @cached_property
    def weights(self) -> Weights:
        """The weights of the engines."""
        on_cpu = self.target.capability is None
        layers = self.layers_per_segment
        return Weights(self.source.model, self.precision.name, self.formats, layers, on_cpu)

    @cached_property
    def reading(self) -> PrefillPlan:
        """How prompts are encoded: the first of four ways that fits the target's memory. They are the default, shorter
        passes, no images, and shorter passes without images. If none fits, the default is returned."""
        model, limit = self.source.model, self.target.memory
        chunks = (PREFILL_CHUNK, min(model.canvas_length, PREFILL_CHUNK))
        sights = (True, False) if model.vision else (False,)
        ways = [PrefillPlan(chunk, sees) for sees in sights for chunk in chunks]
        fitting = (way for way in ways if limit is None or self.memory_when(way).total <= limit)
        return next(fitting, ways[0])

    def passes_when(self, reading: PrefillPlan) -> PassPlan:
        """Return the pass plan for one way of encoding prompts. Without images, experts need fewer rows."""
        sizes = self.max_context, self.max_batch, reading.prefill_chunk
        return self.experts.passes(plan_passes(self._seen(reading), *sizes))

    @cached_property
    def passes(self) -> PassPlan:
        """The pass plan."""
        return self.passes_when(self.reading)

    def memory_when(self, reading: PrefillPlan) -> Estimate:
        """Return how much memory serving takes if prompts are encoded as in `reading`."""
        weights = replace(self.weights, model=self._seen(reading))
        return estimate(weights, self.passes_when(reading), self.kv_cache, self.experts)

    def _seen(self, reading: PrefillPlan) -> ModelConfig:
        model = self.source.model
        return model if reading.sees else replace(model, vision=None)

    @cached_property
    def memory(self) -> Estimate:
        """The memory that serving takes."""
        return self.memory_when(self.reading)

    @property
    def fits(self) -> bool | None:
        """Whether serving fits the target's memory; None if this memory is unknown."""
        return None if self.target.memory is None else self.memory.total <= self.target.memory

    @cached_property
    def needs(self) -> Needs:
        """What the build needs on this machine."""
        source, graphs = self.source, None
        if source.graphs is None or self.quantizes:
            graphs = replace(self.weights, on_cpu=False, in_files=True)
        calibration = None
        with contextlib.suppress(CanvasError):  # unusable prompts are reported by `check_plan`
            calibration = self.calibrates
        workers = builders_at_once(self.target)
        return host_needs(self.weights, graphs, self.experts, workers, calibration)

    @property
    def disk(self) -> int:
        """The peak disk use, in bytes, of a build with an empty cache."""
        return self.needs.disk(self.spends_graphs)

    @cached_property
    def prompts(self) -> CalibrationPrompts | None:
        """The prompts of the build's calibration; None if the build does not calibrate, or if its prompts are
        unknown."""
        recipe, checkpoint = self.precision.recipe, self.source.checkpoint
        if recipe is None and self.precision.is_quantized and checkpoint:
            leaves = checkpoint.quantization and not checkpoint.quantization.static
            recipe = load_recipe(self.precision.name) if leaves else None
        if (
            recipe is None
            or not recipe.is_calibrated
            or (self.source.is_quantized and self.source.graphs)
        ):
            return None
        return prompts_of(self.source, recipe, self.calibration)

    @cached_property
    def calibrates(self) -> CalibrationNeeds | None:
        """What the calibration needs; None without `prompts`. Raises CanvasError for unusable prompts."""
        if self.prompts is None:
            return None
        width = 4 if self.source.precision == "fp32" else 2
        return calibration_needs(self.prompts, self.source.path, width)

    @cached_property
    def other_precisions(self) -> list[Precision]:
        """The precisions, other than the plan's, that the target and the source allow."""
        others = []
        for name in () if self.source.is_quantized else self.target.precisions:
            if name != self.precision.name:
                other = parse_precision(name)
                # Skip the precision if the model's rows are not whole blocks of its formats.
                with contextlib.suppress(CanvasError):
                    other.formats(self.source.model)
                    others.append(other)
        return others

    @property
    def requests(self) -> str:
        """A text that says how many requests the engines serve, and how long these can get."""
        return f"{self.max_batch} request{'s' * (self.max_batch > 1)} of {self.max_context} tokens"

    def to_json(self) -> dict[str, Any]:
        """Return what `--dry-run` prints."""
        return {
            "source": {"path": str(self.source.path), "kind": self.source.made_from["kind"]},
            "target": self.target.name,
            "builder": self.target.builder,
            **self.options,
            "recipe": self.precision.recipe.name if self.precision.recipe else None,
            "out": str(self.out),
            "layers": len(self.source.model.layers),
            "memory": self.memory.to_json(),
            "target_memory": self.target.memory,
            "fits": self.fits,
            "needs": {**self.needs.to_json(), "disk": self.disk},
        }


def make_plans(
    source: Source,
    targets: Sequence[Target],
    out: Path | str,
    options: BuildOptions = DEFAULT_OPTIONS,
) -> list[Plan]:
    """Return one plan per target. A single plan writes to `out`; several plans write to `out/<target>`. Raises
    CanvasError for options that the model or a target rules out."""
    precisions = choose_precisions(targets, options.precision, source.precision)
    context, layers = check_options(options, source, precisions)
    folder, plans = Path(out).expanduser(), []
    for target, precision in zip(targets, precisions, strict=True):
        made = Plan(
            source,
            target,
            precision,
            context,
            options.max_batch,
            folder if len(targets) == 1 else folder / target.name,
            layers,
            options.calibration and options.calibration.expanduser(),
            options.adapters,
            find_experts(options.experts),
            options.keep_graphs,
        )
        # This also raises CanvasError if a pattern of the recipe matches no weight.
        made.experts.check(target, source.model, made.expert_formats)
        plans.append(shortened(made) if options.layers_per_segment is None else made)
    return cut_alike(plans)


def shortened(plan: Plan) -> Plan:
    """Return the plan with segments of `SHORT_SEGMENT` layers if longer segments take much memory to build and the
    target has room for short segments, which take slightly more memory to serve. Otherwise, return the plan unchanged.

    A target has room if its memory is unknown, or if serving with short segments takes at most 95% of that memory and
    does not change how prompts are encoded. A CPU's segments are cut in the same way, so that targets can share an
    export.
    """
    # Exported graphs are already cut. Engines without the experts' weights never take much memory to build.
    if plan.source.graphs is not None or not plan.experts.in_engines:
        return plan
    built = builder_needs(replace(plan.weights, on_cpu=False), plan.experts)
    if max(built.values()) <= MUCH_TO_BUILD:
        return plan
    short, room = replace(plan, layers_per_segment=SHORT_SEGMENT), plan.target.memory
    if room is None or (short.reading == plan.reading and short.memory.total <= 0.95 * room):
        return short
    return plan


def cut_alike(plans: Sequence[Plan]) -> list[Plan]:
    """Cut the plans of one source and precision into the same segments, so that they share graphs. If one plan's target
    has no room for short segments, all plans of its precision get long segments."""
    longest: dict[str, int] = {}
    for each in plans:
        kind = each.precision.text
        longest[kind] = max(each.layers_per_segment, longest.get(kind, 0))
    return [replace(each, layers_per_segment=longest[each.precision.text]) for each in plans]


# A plan's graphs are kept in the cache if they take at most this many bytes.
KEPT_GRAPHS = 2 * 10**9
# A manifest leaves out options that have these values.
DEFAULT_VALUES: dict[str, Any] = {
    "adapters": [],
    "calibration": None,
    "experts": SLOTTED,
    "prefill_chunk": PREFILL_CHUNK,
    "vision": True,
}
