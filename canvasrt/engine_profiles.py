"""Reads an engine's optimization profiles from its bundle's manifest, and selects the profile for a call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from canvasrt.bundle import Manifest
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.defaults import OCTET, PREFILL_CHUNK
from canvasrt.pass_shapes import PassPlan, Range, in_units, plan_passes

UNLIMITED = 1 << 40


class Profiles:
    """The profiles of one engine, in build order. An engine without profiles accepts any size."""

    def __init__(self, profiles: Iterable[Mapping[str, Any]] | None) -> None:
        # Besides sizes, a profile can have a name, which is left out here.
        self._profiles = [
            {name: Range(**size) for name, size in each.items() if isinstance(size, Mapping)}
            for each in profiles or ()
        ]

    @property
    def count(self) -> int:
        """The number of profiles; 1 if none are listed."""
        return max(1, len(self._profiles))

    @property
    def has_slots(self) -> bool:
        """Whether experts have slots instead of sorted rows.

        With slots, every profile that limits the length also limits the slots. Profiles for ONNX Runtime on a GPU have
        neither limit.
        """
        return all("capacity" in each for each in self._profiles if "length" in each)

    def pick(self, dims: Mapping[str, int]) -> int | None:
        """Return the index of the profile for `dims`; None if no profile matches. If several match, prefer the
        fewest dynamic dimensions, because fixed sizes need fewer kernels; in a tie, prefer the closest optimum.
        """
        if not self._profiles:
            return 0
        fitting = [
            (_open(profile, dims), _distance(profile, dims), number)
            for number, profile in enumerate(self._profiles)
            if _holds(profile, dims)
        ]
        return min(fitting)[-1] if fitting else None

    def largest(self, name: str, dims: Mapping[str, int]) -> int:
        """Return the largest size of dimension `name` that a profile accepts together with the other sizes in `dims`;
        0 if no profile accepts the other sizes."""
        if not self._profiles:
            return UNLIMITED
        others = {key: size for key, size in dims.items() if key != name}
        holding = [profile for profile in self._profiles if _holds(profile, others)]
        return max((p[name].max if name in p else UNLIMITED for p in holding), default=0)

    def smallest(self, name: str, dims: Mapping[str, int]) -> int:
        """Return the smallest maximum of dimension `name` over the profiles that accept `dims`; 0 if no such profile
        limits this dimension."""
        holding = [profile for profile in self._profiles if _holds(profile, dims)]
        return min((profile[name].max for profile in holding if name in profile), default=0)


def passes_of(manifest: Manifest) -> PassPlan:
    """Return a bundle's pass plan. If an earlier version built the bundle without a plan, derive the plan from the
    engines."""
    if manifest.passes is not None:
        return PassPlan.from_json(manifest.passes)
    bodies = [Profiles(each.get("profiles")) for each in manifest.segments if "layers" in each]
    model = manifest.model
    return passes_taken(model, bodies, model.max_position_embeddings)


def passes_taken(model: ModelConfig, bodies: Sequence[Profiles], max_context: int) -> PassPlan:
    """Derive the pass plan for body segments with these profiles, for requests of `max_context` tokens."""

    def most(name: str, **dims: int) -> int:
        return min(each.largest(name, dims) for each in bodies)

    canvas, limit = model.canvas_length, in_units(max_context)
    longest = max(canvas, min(PREFILL_CHUNK, most("length")))
    plan = plan_passes(model, max(longest, max_context), most("batch", length=canvas), longest)
    if not all(each.has_slots for each in bodies):
        plan = plan.without_slots()
    rows = most("capacity", batch=1, length=plan.prefill_chunk)
    roomy = max((each for each in plan.lengths if each <= rows), default=plan.roomy)
    full, sliding = (OCTET * most(f"octets_{kind}") for kind in ("full", "sliding"))
    plan = replace(plan, roomy=roomy, window=min(plan.window, limit, sliding))
    return plan.within(min(limit, full))


def _holds(profile: Mapping[str, Range], dims: Mapping[str, int]) -> bool:
    # A segment without full layers, or without sliding layers, has no dimension for the missing layers' cache.
    return all(profile[name].holds(size) for name, size in dims.items() if name in profile)


def _open(profile: Mapping[str, Range], dims: Mapping[str, int]) -> int:
    return sum(profile[name].min < profile[name].max for name in dims if name in profile)


def _distance(profile: Mapping[str, Range], dims: Mapping[str, int]) -> float:
    return sum(
        abs(math.log((size + 1) / (profile[name].opt + 1)))
        for name, size in dims.items()
        if name in profile
    )
