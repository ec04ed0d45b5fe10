"""The two forms in which a GPU runs the experts: in slots inside the engines, or as our own kernels over sorted rows,
between engines of one layer. A build selects one form by name; the form implements everything that depends on it."""

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

# Bytes of a piece's engine in addition to its weights.
PIECE_CODE = 10 * 10**6


class Slots:
    """Experts inside the engines, with the pass plan's rows per expert."""

    name = SLOTTED
    # whether the experts are inside the engines
    in_engines = True
    # suffixes of weights that are in no engine
    outside: tuple[str, ...] = ()
    # modules that a build needs, with their extras
    modules: tuple[tuple[str, str], ...] = ()
    # packages, in addition to the builder, whose versions determine the result
    packages: tuple[str, ...] = ()

    def check(self, target: Target, model: ModelConfig, formats: set[str]) -> None:
        """Raise CanvasError for targets and weight widths that this form does not support."""

    def passes(self, passes: PassPlan) -> PassPlan:
        """Return the pass plan, given that for slots."""
        return passes

    def workspace(self, model: ModelConfig, passes: PassPlan, element: int) -> int:
        """Return the bytes of the engines' workspace for experts: gathered rows, intermediate results, and outputs."""
        slot = 2 * model.hidden_size + 3 * model.moe_intermediate_size
        return model.num_experts * passes.most_rows * slot * element

    def code(self, layers: int, bodies: int, engine: int) -> int:
        """Return the bytes of kernel code of all body segments. layers: number of layers by segment. engine: bytes of
        code per engine."""
        return engine * bodies

    def contexts(self, layers: int, bodies: int, batch: int) -> int:
        """Return the number of execution contexts of all body segments. Every engine has one context per profile, one
        per place in the batch, and one for shared passes."""
        return bodies * (2 + 2 * (batch > 1) + batch)

    def buffers(self, model: ModelConfig, passes: PassPlan, element: int) -> int:
        """Return the bytes of additional buffers, with `element` bytes per activation."""
        return 0

    def profiles(self, profiles: Mapping[str, dict[str, Range]]) -> dict[str, dict[str, Range]]:
        """Return the profiles of a body segment's engines."""
        return dict(profiles)


class SortedRows(Slots):
    """Experts as kernels between engines, over rows sorted by expert."""

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
            # Raises CanvasError for formats without a kernel, and for rows that the kernel's steps do not divide.
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
    """Return the form with this name in `--experts` and manifests."""
    if name not in _BY_NAME:
        raise UsageError(f"unknown --experts {name!r}", f"give {SLOTTED} or {SORTED}")
    return _BY_NAME[name]
