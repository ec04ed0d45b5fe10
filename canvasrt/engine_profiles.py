"""An engine's optimization profiles, as its bundle's manifest lists them, and which one a call
uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from canvasrt.pass_shapes import Range

UNLIMITED = 1 << 40


class Profiles:
    """The profiles of one engine, in build order. Without profiles, every size works."""

    def __init__(self, profiles: Iterable[Mapping[str, Any]] | None) -> None:
        # A profile may carry a name next to its dimensions.
        self._profiles = [
            {name: Range(**size) for name, size in each.items() if isinstance(size, Mapping)}
            for each in profiles or ()
        ]

    def pick(self, dims: Mapping[str, int]) -> int | None:
        """Return the number of the profile that holds `dims` and leaves the fewest of them open, then of the one whose
        usual sizes are closest; None if no profile holds them.

        The builder makes fewer kernels of a size that it knows.
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
        """Return the largest size of `name` for the other `dims`; 0 if no profile holds those."""
        if not self._profiles:
            return UNLIMITED
        others = {key: size for key, size in dims.items() if key != name}
        holding = [profile for profile in self._profiles if _holds(profile, others)]
        return max((p[name].max if name in p else UNLIMITED for p in holding), default=0)

    def smallest(self, name: str, dims: Mapping[str, int]) -> int:
        """Return the smallest maximum of `name` among the profiles that hold `dims`; 0 if there is none."""
        holding = [profile for profile in self._profiles if _holds(profile, dims)]
        return min((profile[name].max for profile in holding if name in profile), default=0)


def _holds(profile: Mapping[str, Range], dims: Mapping[str, int]) -> bool:
    # A segment without layers of a kind has no dimension for their past.
    return all(profile[name].holds(size) for name, size in dims.items() if name in profile)


def _open(profile: Mapping[str, Range], dims: Mapping[str, int]) -> int:
    return sum(profile[name].min < profile[name].max for name in dims if name in profile)


def _distance(profile: Mapping[str, Range], dims: Mapping[str, int]) -> float:
    return sum(
        abs(math.log((size + 1) / (profile[name].opt + 1)))
        for name, size in dims.items()
        if name in profile
    )
