"""What a build will do, decided and checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from canvasrt import extras
from canvasrt.build import memory
from canvasrt.build.needs import Needs, has_short_segments, host_needs
from canvasrt.build.precision import Precision, choose_precisions
from canvasrt.build.source import Source
from canvasrt.bundle import MANIFEST, Bundle, load_bundle, made_by
from canvasrt.cache import load_checked
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.weight_names import DOWN, GATE_UP
from canvasrt.defaults import (
    ADAPTER_FILES,
    LAYERS_PER_SEGMENT,
    MAX_BATCH,
    MAX_CONTEXT,
    PREFILL_CHUNK,
    SHORT_SEGMENT,
    SLOTTED,
    SORTED,
)
from canvasrt.errors import CanvasError, UsageError
from canvasrt.formats import FORMATS
from canvasrt.hashes import hash_files
from canvasrt.recipes.calibration import check_calibration
from canvasrt.sorted_rows.description import (
    DOWN_KERNEL,
    GATE_UP_KERNEL,
    KernelForm,
    inputs_per_step,
)
from canvasrt.targets import Target, find_target

# Folders of LoRA adapters, and the factor for each.
Adapters = tuple[tuple[Path, float], ...]


@dataclass(frozen=True)
class BuildOptions:
    """What a user may choose. None lets the source and the target decide."""

    precision: str | None = None
    max_context: int | None = None
    max_batch: int = MAX_BATCH
    layers_per_segment: int | None = None
    calibration: Path | None = None
    adapters: Adapters = ()
    experts: str = SLOTTED


DEFAULT_OPTIONS = BuildOptions()


@dataclass(frozen=True)
class Plan:
    """One engine bundle to build.

    `calibration` is a file of prompts, for a recipe that needs calibration. `adapters` are merged
    into the checkpoint.
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
    experts: str = SLOTTED

    @cached_property
    def options(self) -> dict[str, Any]:
        """The manifest's `options` that the user chose."""
        chosen: dict[str, Any] = {
            "precision": self.precision.name,
            "max_context": self.max_context,
            "max_batch": self.max_batch,
            "layers_per_segment": self.layers_per_segment,
        }
        if self.prefill_chunk != PREFILL_CHUNK:
            chosen["prefill_chunk"] = self.prefill_chunk
        if self.source.model.vision and not self.reading.sees:
            chosen["vision"] = False
        if self.sorts_rows:
            chosen["experts"] = self.experts
        if self.precision.recipe is not None:
            chosen["recipe"] = self.precision.recipe.to_json()
        if self.calibration_hash is not None:
            chosen["calibration"] = self.calibration_hash
        if self.adapters:
            chosen["adapters"] = self.adapter_hashes
        return chosen

    @property
    def sorts_rows(self) -> bool:
        """Whether the experts run as kernels of our own, over sorted rows, between the engines."""
        return self.experts == SORTED

    @cached_property
    def adapter_hashes(self) -> list[dict[str, Any]]:
        """Each adapter's files by SHA-256 and its weight, as in the graphs' manifest."""
        return [
            {"files": hash_files(path, ADAPTER_FILES), "weight": weight}
            for path, weight in self.adapters
        ]

    @cached_property
    def calibration_hash(self) -> str | None:
        """The SHA-256 of the user's calibration file; None without one."""
        if self.calibration is None or not self.precision.is_calibrated:
            return None
        return hash_files(self.calibration.parent, [self.calibration.name])[self.calibration.name]

    @property
    def formats(self) -> dict[str, str] | None:
        """The format of each quantized weight, by global name; None if unknown before the export."""
        if self.precision.recipe is None and self.source.is_quantized:
            return self.source.formats
        return self.precision.formats(self.source.model)

    @property
    def kv_cache(self) -> str | None:
        """The format of cached keys and values, from the recipe asked for or the one that made the graphs."""
        if self.precision.recipe is not None:
            return self.precision.recipe.kv_cache
        graphs = self.source.graphs
        made_with = graphs.manifest.options.get("recipe") if graphs else None
        return (made_with or {}).get("kv_cache")

    @cached_property
    def reading(self) -> memory.Reading:
        """How prompts are read: in shorter passes, or without images, if nothing else fits the target."""
        return memory.reading(self.source.model, self.target.memory, self.memory_when)

    @property
    def prefill_chunk(self) -> int:
        """The most tokens per row of an encoding pass."""
        return self.reading.prefill_chunk

    def memory_when(self, reading: memory.Reading) -> memory.Estimate:
        """Return the memory that serving takes if prompts are read so."""
        return memory.estimate(
            self.source.model,
            self.precision.name,
            self.max_context,
            self.max_batch,
            on_cpu=self.target.capability is None,
            formats=self.formats,
            kv_cache=self.kv_cache,
            layers_per_segment=self.layers_per_segment,
            prefill_chunk=reading.prefill_chunk,
            sees=reading.sees,
            sorts_rows=self.sorts_rows,
        )

    @property
    def memory(self) -> memory.Estimate:
        """The memory that serving takes."""
        return self.memory_when(self.reading)

    @property
    def fits(self) -> bool | None:
        """Whether it fits the target's memory; None if the target does not say how much it has."""
        return None if self.target.memory is None else self.memory.total <= self.target.memory

    @property
    def needs(self) -> Needs:
        """What building takes on this machine."""
        return host_needs(
            self.source,
            self.precision,
            self.formats,
            self.layers_per_segment,
            on_cpu=self.target.capability is None,
            sorts_rows=self.sorts_rows,
        )

    def existing(self) -> Bundle | None:
        """Return the bundle that an earlier build left at `out`, if this build would make the same.

        Raises CanvasError when `out` holds something else.
        """
        if not (self.out / MANIFEST).exists():
            return None
        found = load_bundle(self.out, kind="engines", check=False)
        difference = self._difference(found)
        if difference:
            raise CanvasError(
                f"{self.out} holds engines made {difference}",
                "name another folder with -o, or remove this one first",
            )
        return load_checked(self.out, "engines")

    def _difference(self, found: Bundle) -> str:
        manifest = found.manifest
        if manifest.made_from.get("source") != self.source.made_from:
            return "from another checkpoint or other graphs"
        if (manifest.target or {}).get("name") != self.target.name:
            return f"for another target ({(manifest.target or {}).get('name')})"
        wanted, made = (_DEFAULTS | each for each in (self.options, manifest.options))
        changed = [
            _change(name, made.get(name), wanted[name])
            for name in wanted
            if made.get(name) != wanted[name]
        ]
        if changed:
            return "with other options: " + "; ".join(changed)
        if manifest.made_by.get("canvasrt") != made_by()["canvasrt"]:
            return f"by another version of canvasrt ({manifest.made_by.get('canvasrt')})"
        if self.target.capability is not None:
            builder = self.target.builder
            before, now = manifest.made_by.get(builder), extras.version(builder)
            if now and before != now:
                return f"by {builder} {before}, but {now} is installed now"
        if self.sorts_rows:
            before, now = manifest.made_by.get("triton"), extras.version("triton")
            if now and before != now:
                return f"with kernels by triton {before}, but {now} is installed now"
        return ""

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
            "needs": self.needs.to_json(),
        }


def plan(
    source: Source,
    target: Target | str,
    out: Path | str,
    options: BuildOptions = DEFAULT_OPTIONS,
    precision: Precision | None = None,
) -> Plan:
    """Check a build's options against the model and the target.

    `precision` is the meaning of `options.precision` for this target, if the caller has chosen it
    already.
    """
    target = find_target(target) if isinstance(target, str) else target
    if precision is None:
        (precision,) = choose_precisions([target], options.precision, source.precision)
    if options.max_batch < 1:
        raise UsageError(f"--max-batch {options.max_batch} is less than 1", "give 1 or more")
    # Another target of the same build may be the one that is calibrated.
    check_calibration(options.calibration, True, precision.text)
    _check_adapters(source, options.adapters)
    formats = precision.formats(
        source.model
    )  # refuses a recipe with a pattern that matches nothing
    _check_experts(options.experts, target, source.model, _expert_formats(source, formats))
    made = Plan(
        source,
        target,
        precision,
        _context(source, options.max_context),
        options.max_batch,
        Path(out).expanduser(),
        _layers(source, options.layers_per_segment),
        options.calibration,
        options.adapters,
        options.experts,
    )
    return _shortened(made) if options.layers_per_segment is None else made


def _expert_formats(source: Source, formats: Mapping[str, str] | None) -> set[str]:
    """Return the formats of the experts' weights. A quantized checkpoint's are not known before its export, but its
    precision is."""
    if source.is_quantized and source.graphs is None:
        return {str(source.precision)}
    found = (source.formats if source.is_quantized else formats) or {}
    return {each for name, each in found.items() if name.endswith((GATE_UP, DOWN))}


def _check_experts(experts: str, target: Target, model: ModelConfig, formats: set[str]) -> None:
    """Refuse a target that kernels over sorted rows do not run on, and widths that they do not multiply."""
    if experts not in (SLOTTED, SORTED):
        raise UsageError(f"unknown --experts {experts!r}", f"give {SLOTTED} or {SORTED}")
    if experts == SLOTTED:
        return
    if target.capability is None:
        raise UsageError(
            f"--experts {SORTED} is for GPUs: on {target.name}, experts always have sorted rows",
            "leave --experts out",
        )
    sizes = memory.expert_sizes(model)
    for format, function in product(sorted(formats), (GATE_UP_KERNEL, DOWN_KERNEL)):
        form = KernelForm(function, sizes, "bfloat16", format)
        # Refuses formats without a kernel, and rows that its steps do not divide.
        inputs_per_step(replace(form, block=FORMATS[format].block(form.width)))


def _check_adapters(source: Source, adapters: Adapters) -> None:
    """Refuse folders without an adapter, and a source that cannot take one."""
    for path, _ in adapters:
        for name in ADAPTER_FILES:
            if not (path / name).is_file():
                raise CanvasError(
                    f"{path} is not an adapter: it has no {name}", "name a folder that PEFT saved"
                )
    if adapters and source.graphs is not None:
        raise UsageError(
            f"{source.path} holds graphs, but --adapter merges into a checkpoint",
            "build from the checkpoint that the adapter was trained on",
        )


def _context(source: Source, requested: int | None) -> int:
    """Check `--max-context`. Without it, return the model's limit or the default, whichever is less."""
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
            f"--max-context {context} leaves no room for a prompt beside one canvas of"
            f" {model.canvas_length} tokens",
            f"give at least {model.canvas_length + 1}",
        )
    return context


def _layers(source: Source, requested: int | None) -> int:
    """Check `--layers-per-segment`. Graphs are already cut."""
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


def _shortened(plan: Plan) -> Plan:
    """Return the plan with shorter segments, if long ones would take much memory to build and the target has room.

    A CPU's are cut alike, so that one export serves both.
    """
    source = plan.source
    # The experts' weights, which take the memory, are not in the engines of pieces.
    if source.graphs is not None or plan.sorts_rows:
        return plan

    def of(reading: memory.Reading, layers: int) -> memory.Estimate:
        return replace(plan, layers_per_segment=layers).memory_when(reading)

    short = has_short_segments(source.model, plan.precision, plan.formats, plan.target.memory, of)
    return replace(plan, layers_per_segment=SHORT_SEGMENT) if short else plan


def cut_alike(plans: Sequence[Plan]) -> list[Plan]:
    """Return plans of one source whose segments are alike where their precision is, so that they share graphs: long ones
    if a target has no room for short ones."""
    longest: dict[str, int] = {}
    for each in plans:
        kind = each.precision.text
        longest[kind] = max(each.layers_per_segment, longest.get(kind, 0))
    return [replace(each, layers_per_segment=longest[each.precision.text]) for each in plans]


# What a manifest that says nothing of an option was built with.
_DEFAULTS: dict[str, Any] = {"adapters": [], "calibration": None, "experts": SLOTTED}
_DEFAULTS |= {"prefill_chunk": PREFILL_CHUNK, "vision": True}


def _change(name: str, before: Any, now: Any) -> str:
    if isinstance(now, dict | list) or name == "calibration":
        return f"another {name}" if before and now else f"{'with' if before else 'without'} {name}"
    return f"{name} {before}, now {now}"
