"""What is refused before a build starts, and what would work instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from canvasrt.build.cache import EngineCache
from canvasrt.build.plan import Plan
from canvasrt.errors import CanvasError
from canvasrt.extras import is_installed, require
from canvasrt.machine import BUILDER_MODULES, has_gpu
from canvasrt.targets import TARGETS, Target

# Builder → the precisions that this version builds with it.
PRECISIONS = {"onnxruntime": ("fp32",), "tensorrt-rtx": ("bf16",), "tensorrt": ("bf16",)}


def precisions_built(target: Target) -> tuple[str, ...]:
    """Those precisions of a target that this version builds."""
    return tuple(name for name in target.precisions if name in PRECISIONS[target.builder])


def check_plan(plan: Plan) -> None:
    """Raise CanvasError when a plan cannot be carried out here, or its engines would not fit their GPU."""
    check_buildable(plan.target, plan.precision)
    check_graphs(plan.target, plan.precision, plan.source.precision)
    check_memory(plan)
    if plan.target.capability is not None:
        EngineCache().check()


def check_buildable(target: Target, precision: str) -> None:
    """Raise CanvasError when engines of a target and precision cannot be built by this version, or here."""
    if precision not in precisions_built(target):
        raise CanvasError(
            f"{precision} engines for {target.name} are not built by this version yet:"
            " quantization comes later",
            _what_is_built(target),
        )
    if target.capability is None:
        return
    module, extra = BUILDER_MODULES[target.builder]
    if not target.builds_anywhere and not has_gpu(target):
        missing = "" if is_installed(module) else f"; nor is {module} installed"
        raise CanvasError(
            f"engines for {target.name} are built on its GPU ({target.gpu}),"
            f" which is not here{missing}",
            f"on a machine with that GPU: pip install 'canvasrt[{extra}]';"
            " --dry-run shows the plan anywhere",
        )
    require(module, extra)


def check_graphs(target: Target, precision: str, of_graphs: str | None) -> None:
    """Raise CanvasError when graphs (None: a checkpoint) are not of the precision to build at."""
    if of_graphs not in (None, precision):
        raise CanvasError(
            f"the graphs are {of_graphs}, and {precision} engines for {target.name} need"
            f" {precision} graphs",
            "build from the checkpoint instead, or from graphs of"
            f" `canvasrt export CHECKPOINT --precision {precision} -o DIR`",
        )


def check_memory(plan: Plan) -> None:
    """Raise CanvasError when serving would take more memory than the target has; name what would fit."""
    if plan.fits is not False or plan.target.memory is None:
        return
    hint = ", or ".join(_what_fits(plan))
    raise CanvasError(
        f"{plan.precision} engines for {plan.max_batch} requests of {plan.max_context} tokens take"
        f" {_gb(plan.memory.total)}, and {plan.target.name} has {_gb(plan.target.memory)}",
        f"this would fit: {hint}" if hint else "no precision or target of this table has room",
    )


def _what_fits(plan: Plan) -> Iterator[str]:
    """Options that would make a plan fit, each by itself; other targets when there are none."""
    found = False
    least = plan.source.model.canvas_length
    contexts = (plan.max_context >> n for n in range(1, plan.max_context.bit_length()))
    smaller: dict[str, Any] = {
        "max_batch": range(plan.max_batch - 1, 0, -1),
        "max_context": [context for context in contexts if context > least],
    }
    for name, sizes in smaller.items():
        fitting = next((size for size in sizes if replace(plan, **{name: size}).fits), None)
        if fitting is not None:
            found = True
            yield f"--{name.replace('_', '-')} {fitting}"
    for precision in plan.target.precisions:
        if precision != plan.precision and replace(plan, precision=precision).fits:
            found = True
            later = "" if precision in precisions_built(plan.target) else " (not built yet)"
            yield f"--precision {precision}{later}"
    if not found:
        for target in TARGETS:
            if plan.precision in target.precisions and replace(plan, target=target).fits:
                yield f"--target {target.name}"


def _what_is_built(target: Target) -> str:
    built = precisions_built(target)
    if built:
        return f"give --precision {built[0]}; --dry-run shows the plan for any"
    others = [
        each.name for each in TARGETS if each.builds_anywhere and "bf16" in precisions_built(each)
    ]
    return f"bf16 engines are, for {', '.join(others)}; --dry-run shows the plan for any target"


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
