"""The statistics of a report: relative errors, divergences, and 95% intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z95 = 1.959963984540054
RESAMPLES = 4000
_PART = 1 << 22


@dataclass
class RelativeError:
    """‖found − expected‖ / ‖expected‖ over all added arrays, in the Euclidean norm."""

    off: float = 0.0
    size: float = 0.0

    def add(self, found: np.ndarray, expected: np.ndarray) -> None:
        """Add a pair of arrays of equal shape. Sums are computed in float64, piece by piece."""
        if found.shape != expected.shape:
            raise ValueError(f"shapes {found.shape} and {expected.shape} differ")
        ours, theirs = found.reshape(-1), expected.reshape(-1)
        for start in range(0, theirs.size, _PART):
            wide = theirs[start : start + _PART].astype(np.float64)
            self.off += float(np.sum((ours[start : start + _PART] - wide) ** 2))
            self.size += float(np.sum(wide**2))

    @property
    def value(self) -> float:
        """The relative error. If all expected numbers are zero, it is 0 for an exact match and infinite otherwise. NaN
        becomes infinite."""
        if self.size == 0:
            return math.inf if self.off else 0.0
        error = math.sqrt(self.off / self.size)
        return error if math.isfinite(error) else math.inf


def joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Return the numbers of all pieces as one array, in which NaN is replaced by infinity."""
    return np.nan_to_num(np.concatenate(pieces, axis=None), nan=np.inf, posinf=np.inf)


Interval = tuple[float, float]


def wilson(right: float, asked: int) -> Interval:
    """Return the 95% interval of the share right / asked (Wilson 1927)."""
    share, z = right / asked, Z95**2 / asked
    middle = share + z / 2
    half = Z95 * math.sqrt(share * (1 - share) / asked + z / (4 * asked))
    return max(0.0, (middle - half) / (1 + z)), min(1.0, (middle + half) / (1 + z))


def paired_loss(lost: int, gained: int, asked: int) -> Interval:
    """Return the 95% interval of (lost − gained) / asked, for paired questions.

    Agresti and Min's adjusted interval adds half an answer to each of the four outcomes.
    """
    lost_, gained_, asked_ = lost + 0.5, gained + 0.5, asked + 2
    loss = (lost_ - gained_) / asked_
    variance = (lost_ + gained_) / asked_ - loss**2
    half = Z95 * math.sqrt(variance / asked_)
    return max(-1.0, loss - half), min(1.0, loss + half)


def ratio_interval(ours: Sequence[int], theirs: Sequence[int]) -> Interval:
    """Return the 95% interval of sum(ours) / sum(theirs) for paired items, by a seeded bootstrap."""
    pairs = np.array([ours, theirs], np.float64)
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(RESAMPLES):
        drawn = pairs[:, random.integers(0, pairs.shape[1], pairs.shape[1])].sum(axis=1)
        ratios.append(drawn[0] / drawn[1])
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)
