"""The two forms in which a GPU runs the experts: in slots inside the engines; or over rows sorted by expert, in our own
kernels between engines. A build selects a form by name; what the forms mean for builds is here.
`canvasrt/expert_slots.py` chooses the numbers of slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.checkpoints.weight_names import DOWN, GATE_UP
from canvasrt.defaults import SLOTTED, SORTED
from canvasrt.errors import UsageError
from canvasrt.formats import FORMATS
from canvasrt.pass_shapes import SLOT_SIZES, PassPlan, Range
from canvasrt.sorted_rows.description import (
    DOWN_KERNEL,
    GATE_UP_KERNEL,
    ExpertSizes,
    KernelForm,
    inputs_per_step,
)
from canvasrt.targets import Target

# Bytes that a piece's engine takes in addition to its weights.
PIECE_CODE = 10 * 10**6


class Slots:
    """Experts inside the engines. The pass plan says how many slots an expert has."""

    name = SLOTTED
    # Whether the experts are inside the engines.
    in_engines = True
    # A weight is in no engine if its name ends with one of these suffixes.
    outside: tuple[str, ...] = ()
    # Modules that a build needs, each with the pip extra that installs it.
    modules: tuple[tuple[str, str], ...] = ()
    # Packages whose versions determine the result, in addition to the builder's.
    packages: tuple[str, ...] = ()

    def check(self, target: Target, model: ModelConfig, formats: set[str]) -> None:
        """Raise CanvasError for a target, weight format or row length that this form does not support."""

    def passes(self, passes: PassPlan) -> PassPlan:
        """Return the pass plan for this form. `passes` is the plan for experts with slots."""
        return passes

    def workspace(self, model: ModelConfig, passes: PassPlan, element: int) -> int:
        """Return how many bytes of workspace experts take: gathered rows, intermediate results, and outputs."""
        slot = 2 * model.hidden_size + 3 * model.moe_intermediate_size
        return model.num_experts * passes.largest_capacity * slot * element

    def code(self, layers: int, bodies: int, engine: int) -> int:
        """Return how many bytes of kernel code all body segments have. There are `bodies` segments, with `layers`
        layers in total. If a segment is not cut into pieces, its engine has `engine` bytes of code."""
        return engine * bodies

    def contexts(self, layers: int, bodies: int, batch: int) -> int:
        """Return the number of execution contexts of all body segments. Every engine has one context per profile, one
        per place in the batch, and, if `batch` is above 1, one for shared passes."""
        return bodies * (2 + 2 * (batch > 1) + batch)

    def buffers(self, model: ModelConfig, passes: PassPlan, element: int) -> int:
        """Return the size in bytes of the buffers that only this form needs, if an activation takes `element` bytes."""
        return 0

    def profiles(self, profiles: Mapping[str, dict[str, Range]]) -> dict[str, dict[str, Range]]:
        """Return a body segment's profiles, adapted to this form."""
        return dict(profiles)


class SortedRows(Slots):
    """Experts as kernels that run between engines, over rows sorted by expert."""

    name = SORTED
    in_engines = False
    outside = (GATE_UP, DOWN)
    modules = (("onnx_ir", "export"), ("triton", "sorted"))
    packages = ("triton",)

    def check(self, target: Target, model: ModelConfig, formats: set[str]) -> None:
        if target.capability is None:
            raise UsageError(
                f"--experts {SORTED} is for GPUs: on {target.name}, experts always have sorted rows",
                "leave --experts out",
            )
        sizes = ExpertSizes.of(model)
        for format, function in product(sorted(formats), (GATE_UP_KERNEL, DOWN_KERNEL)):
            form = KernelForm(function, sizes, "bfloat16", format)
            # This raises CanvasError for a format without a kernel, and for rows that are not whole kernel steps.
            inputs_per_step(replace(form, block=FORMATS[format].block(form.width)))

    def passes(self, passes: PassPlan) -> PassPlan:
        return passes.without_slots()

    def workspace(self, model: ModelConfig, passes: PassPlan, element: int) -> int:
        return 0

    def code(self, layers: int, bodies: int, engine: int) -> int:
        return PIECE_CODE * (layers + bodies)

    def contexts(self, layers: int, bodies: int, batch: int) -> int:
        return super().contexts(layers, layers + bodies, batch)

    def buffers(self, model: ModelConfig, passes: PassPlan, element: int) -> int:
        tokens = max(passes.lengths[-1], passes.batch * passes.canvas)
        return sum(ExpertSizes.of(model).buffers(tokens, element).values())

    def profiles(self, profiles: Mapping[str, dict[str, Range]]) -> dict[str, dict[str, Range]]:
        return {
            name: {each: size for each, size in sizes.items() if each not in SLOT_SIZES}
            for name, sizes in profiles.items()
        }


Experts = Slots
SLOTS = Slots()
_BY_NAME: dict[str, Experts] = {each.name: each for each in (SLOTS, SortedRows())}


def find_experts(name: str) -> Experts:
    """Return the form that has this name in `--experts` and in manifests."""
    if name not in _BY_NAME:
        raise UsageError(f"unknown --experts {name!r}", f"give {SLOTTED} or {SORTED}")
    return _BY_NAME[name]
