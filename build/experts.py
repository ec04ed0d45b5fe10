"""How a GPU runs the experts: in slots inside the engines, or as kernels of our own over sorted rows between engines of one
layer each. A build chooses one form by name and asks it for everything that depends on the form."""

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

# Bytes that a piece's engine holds besides its weights.
PIECE_CODE = 10 * 10**6


class Slots:
    """Experts inside the engines, with the slots of the plan of passes."""

    name = SLOTTED
    # Whether engines hold the experts.
    in_engines = True
    # Names of weights, by their ends, that are in no engine.
    outside: tuple[str, ...] = ()
    # Modules that a build needs, with their extras.
    modules: tuple[tuple[str, str], ...] = ()
    # Packages, besides the builder, that determine the result.
    packages: tuple[str, ...] = ()

    def check(self, target: Target, model: ModelConfig, formats: set[str]) -> None:
        """Refuse targets and weight widths that these experts do not support."""

    def workspace(self, model: ModelConfig, passes: PassPlan, element: int) -> int:
        """Return the experts' share of the engines' workspace in bytes: gathered rows, intermediate results, and outputs."""
        slot = 2 * model.hidden_size + 3 * model.moe_intermediate_size
        return model.num_experts * passes.most_rows * slot * element

    def code(self, layers: int, bodies: int, engine: int) -> int:
        """Return the bytes of kernel code of all body segments. layers: of all segments. engine: bytes of one engine's code."""
        return engine * bodies

    def contexts(self, layers: int, bodies: int, batch: int) -> int:
        """Return how many execution contexts all body segments have: of each engine one per profile, one for each place in the
        batch, and one for shared passes."""
        return bodies * (2 + 2 * (batch > 1) + batch)

    def buffers(self, model: ModelConfig, passes: PassPlan, element: int) -> int:
        """Return the bytes of their own buffers, with `element` bytes per activation."""
        return 0

    def profiles(self, profiles: Mapping[str, dict[str, Range]]) -> dict[str, dict[str, Range]]:
        """Return the profiles of a body segment's engines."""
        return dict(profiles)


class SortedRows(Slots):
    """Experts between engines, over rows sorted by expert."""

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
            # Refuses formats without a kernel, and rows that its steps do not divide.
            inputs_per_step(replace(form, block=FORMATS[format].block(form.width)))

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
    """Return the form of the experts by its name in `--experts` and manifests."""
    if name not in _BY_NAME:
        raise UsageError(f"unknown --experts {name!r}", f"give {SLOTTED} or {SORTED}")
    return _BY_NAME[name]
