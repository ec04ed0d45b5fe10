"""Checks builds before they start, and suggests what would work instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from canvasrt.build.needs import (
    check_disk,
    check_memory_here,
    check_memory_to_write,
    gigabytes,
    same_disk,
)
from canvasrt.build.options import Precision
from canvasrt.build.plan import Plan
from canvasrt.build.reuse import built_weights, held_bytes, reusable_graphs
from canvasrt.build.source import Source
from canvasrt.bundle import Bundle
from canvasrt.cache import cache_folder, check_cache
from canvasrt.defaults import MUCH_TO_BUILD
from canvasrt.errors import CanvasError
from canvasrt.extras import is_installed, require
from canvasrt.formats import PLAIN
from canvasrt.machine import BUILDER_MODULES, has_gpu, memory_bytes
from canvasrt.targets import TARGETS, Target


class Verdict(NamedTuple):
    """What a dry run says about a plan.

    Attributes:
        not_here: why this machine would refuse the build; None if it would accept the build.
        hint: what to do about a refusal. If this machine can build the engines, but has too little memory to serve
            them, the hint says which options would fit.
        lighter: see `lighter_segments`.
    """

    not_here: str | None
    hint: str | None
    lighter: tuple[int, int] | None


def judge(plan: Plan) -> Verdict:
    """Return what a dry run says about a plan."""
    lighter = lighter_segments(plan)
    try:
        check_plan(plan)
        check_space([plan], reusable_graphs([plan]))
    except CanvasError as error:
        return Verdict(error.message, error.hint, lighter)
    here = memory_bytes()
    tight = plan.target.memory is None and plan.memory.total > here
    return Verdict(None, what_fits(plan, here) if tight else None, lighter)


def check_plan(plan: Plan) -> None:
    """Raise CanvasError if this machine cannot build the plan, or if serving would not fit the target's memory."""
    check_source(plan.target, plan.precision, plan.source)
    check_machine(plan)
    check_memory(plan)
    check_cache()
    for name, need in plan.needs.segments.items():
        check_memory_here(name, need)
    _ = plan.calibrates  # raises for unusable prompts


def check_source(target: Target, precision: Precision, source: Source) -> None:
    """Raise CanvasError if engines in this precision cannot be built from the source."""
    have = source.precision
    what = "graphs are" if source.graphs is not None else "checkpoint's weights are"
    if source.is_quantized and (source.graphs is not None or precision.is_quantized):
        if have != precision.name or not _same_recipe(source, precision):
            raise CanvasError(
                f"the {what} already quantized to {have}, so {target.name} engines"
                f" in {precision.text} cannot be built from them",
                f"build them as they are, for {_targets_with(str(have))},"
                " or start from a checkpoint with plain weights",
            )
        if source.graphs is not None:
            _check_base(target, source.graphs)
    elif source.graphs is not None and have != precision.exported:
        raise CanvasError(
            f"the {what} {have}, but {precision.name} engines for {target.name} need"
            f" {precision.exported} graphs",
            "build from the checkpoint instead, or from graphs of"
            f" `canvasrt export CHECKPOINT --precision {precision.exported} -o DIR`",
        )


def _check_base(target: Target, graphs: Bundle) -> None:
    """Raise CanvasError if the target is a GPU and unquantized weights are not in bf16, which GPU engines need."""
    base = graphs.manifest.options.get("base_precision", "bf16")
    if target.capability is not None and base != "bf16":
        raise CanvasError(
            f"the graphs were quantized from {base}, but engines for {target.name} need graphs quantized from bf16",
            "quantize graphs of `canvasrt export CHECKPOINT --precision bf16 -o DIR`",
        )


def _same_recipe(source: Source, precision: Precision) -> bool:
    """Return whether a quantized source was made by the recipe of `precision`; true if `precision` has no recipe."""
    if precision.recipe is None:
        return True
    made_with = source.graphs and source.graphs.manifest.options.get("recipe")
    return made_with == precision.recipe.to_json()


def check_machine(plan: Plan) -> None:
    """Raise CanvasError if this machine lacks the GPU or a pip extra that the build needs. Called before anything is
    written."""
    target = plan.target
    if target.capability is not None:
        module, extra = BUILDER_MODULES[target.builder]
        if not target.builds_anywhere and not has_gpu(target):
            missing = "" if is_installed(module) else f", and {module} is not installed"
            raise CanvasError(
                f"engines for {target.name} can only be built on its GPU ({target.gpu}),"
                f" which this machine does not have{missing}",
                f"run `pip install 'canvasrt[{extra}]'` on a machine with that GPU;"
                " --dry-run shows the plan on any machine",
            )
        require(module, extra)
    if plan.source.graphs is None:
        require("torch", "export")
    if plan.source.graphs is None or plan.quantizes or target.capability is None:
        require("onnx", "export")
    if plan.quantizes and not is_installed("modelopt"):  # an import would take seconds
        raise CanvasError("modelopt is not installed", "run `pip install 'canvasrt[export]'`")
    for module, extra in plan.experts.modules:
        require(module, extra)


def check_space(plans: Sequence[Plan], reusable: Mapping[str, Bundle | None]) -> None:
    """Raise CanvasError if the disks lack space for the files of all plans of one source. `reusable` is the result of
    `reusable_graphs` for these plans.

    Plans of the same precision and GPU capabilities share their engines, which count once. Files that are already in
    the cache, such as those of interrupted builds, do not count.
    """
    cache, peak, kept = cache_folder(), 0, 0
    counted: set[Any] = set()
    sharing = Counter(plan.precision.text for plan in plans)
    outputs: dict[Path, int] = {}
    unwritten: list[Plan] = []
    for plan in plans:
        kind, needs, there = plan.precision.text, plan.needs, 0
        engine = kind, plan.target.capabilities
        if not same_disk(cache, plan.out):
            # The cache is on another disk, so its files are copied to the output, not linked.
            outputs[plan.out.resolve()] = max(needs.engines, needs.graphs)
        if graphs := reusable[kind]:
            needs = needs.left({Path(name).stem for name in built_weights([plan], graphs)})
            there = needs.graphs
        else:
            check_memory_to_write(needs)
            unwritten.append(plan)
        spends = plan.spends_graphs and sharing[kind] == 1
        if kind not in counted:
            peak = max(peak, kept + needs.disk(spends) - there)
            kept += (0 if spends else needs.graphs) - there
        if engine not in counted:
            kept += needs.engines
        peak = max(peak, kept)
        counted |= {kind, engine}
    if unwritten:
        peak = max(0, peak - held_bytes(unwritten))
    check_disk({cache: peak, **outputs})


def lighter_segments(plan: Plan) -> tuple[int, int] | None:
    """Return half the plan's layers per segment, and the memory in bytes that a build with segments this short takes.
    Return None if the plan's own build does not take much memory, or if halving does not help."""
    layers = plan.layers_per_segment // 2
    if plan.source.graphs is not None or not layers or plan.needs.building <= MUCH_TO_BUILD:
        return None
    needed = replace(plan, layers_per_segment=layers).needs.memory
    return (layers, needed) if needed < plan.needs.memory else None


def check_memory(plan: Plan) -> None:
    """Raise CanvasError if serving would take more memory than the target has. The hint suggests options that fit."""
    if plan.fits is not False or plan.target.memory is None:
        return
    raise CanvasError(
        f"{_takes(plan)}, but {plan.target.name} has {gigabytes(plan.target.memory)}",
        what_fits(plan, plan.target.memory),
    )


def check_memory_to_serve(plan: Plan, memory: int) -> None:
    """Raise CanvasError if serving would take more than `memory` bytes, the memory of this machine."""
    if plan.memory.total <= memory:
        return
    raise CanvasError(
        f"{_takes(plan)}, but this machine has {gigabytes(memory)}",
        f"build with other options, then serve what was built: `canvasrt build {plan.source.path} --target"
        f" {plan.target.name} … -o DIR` and `canvasrt serve DIR`; {what_fits(plan, memory)}",
    )


def _takes(plan: Plan) -> str:
    return f"{plan.precision.text} engines for {plan.requests} take {gigabytes(plan.memory.total)}"


def what_fits(plan: Plan, memory: int) -> str:
    """Return a hint that lists options, each of which makes the plan fit in `memory` bytes. If no single option does,
    the hint names a combination of options, or else other targets."""
    plan = replace(plan, target=replace(plan.target, memory=memory))
    others = [
        f"--target {target.name}"
        for target in TARGETS
        if plan.precision.name in target.precisions and replace(plan, target=target).fits
    ]
    found = [*_one_option(plan)] or _several_options(plan) or others
    return f"this would fit: {', or '.join(found)}" if found else "nothing smaller fits either"


def _one_option(plan: Plan) -> Iterator[str]:
    sizes = {"max_batch": range(plan.max_batch - 1, 0, -1), "max_context": _contexts(plan)}
    for name, smaller in sizes.items():
        changed: list[dict[str, Any]] = [{name: size} for size in smaller]
        if fitting := next((each for each in changed if replace(plan, **each).fits), None):
            yield f"--{name.replace('_', '-')} {fitting[name]}"
    for precision in plan.other_precisions:
        if replace(plan, precision=precision).fits:
            yield f"--precision {precision.name}"


def _several_options(plan: Plan) -> list[str]:
    """Return options under which a single request fits: the first precision in which any context fits, and the longest
    context that fits."""
    for precision in (plan.precision, *plan.other_precisions):
        for context in (plan.max_context, *_contexts(plan)):
            if replace(plan, precision=precision, max_context=context, max_batch=1).fits:
                changed = precision.name != plan.precision.name
                chosen = f"--precision {precision.name} " if changed else ""
                return [f"{chosen}--max-context {context} --max-batch 1"]
    return []


def _contexts(plan: Plan) -> list[int]:
    """Return shorter context lengths, each half of the one before."""
    halves = (plan.max_context >> n for n in range(1, plan.max_context.bit_length()))
    return [context for context in halves if context > plan.source.model.canvas_length]


def _targets_with(precision: str) -> str:
    return ", ".join(
        target.name
        for target in TARGETS
        if precision in target.precisions and (target.capability or precision not in PLAIN)
    )
