"""Measures whether probabilities are calibrated: expected calibration error, Brier score, reliability, and best
temperatures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from canvasrt.fidelity.stats import wilson
from canvasrt.runtime.answers.questions import TYPES, tempered
from canvasrt.types import Json

BINS = 10
_SIMULATED = 500
_LEAST = 1e-12  # the smallest probability whose logarithm is computed
_COLDEST, _HOTTEST, _ROUNDS = 0.05, 20.0, 40


@dataclass(frozen=True, eq=False)
class Scored:
    """One answered question.

    draws: the model's probabilities, `[samples, options]`. right: `[options]`, the true probabilities; if only the
    right option is known, 1 for that option and 0 for the others.
    """

    type: str
    group: str
    draws: np.ndarray
    right: np.ndarray

    @property
    def event(self) -> int:
        """The index of the option whose probability is checked: yes for a predicate, otherwise the likeliest option."""
        return 0 if self.type == "predicate" else int(self.draws.mean(axis=0).argmax())

    @property
    def known(self) -> bool:
        """Whether `right` contains known probabilities instead of one right option."""
        return bool(((self.right > 0) & (self.right < 1)).any())


def summary(scored: Sequence[Scored]) -> Json:
    """Return the number of questions, the errors of their probabilities, and the bins of the reliability diagram.

    `brier_at_best` is the Brier score that the true probabilities would have. It is above 0 only if some true
    probabilities are known and are neither 0 nor 1.
    """
    pairs = [(each, _mean(each, 1.0)) for each in scored]
    shares = np.array([mean[each.event] for each, mean in pairs])
    right = np.array([each.right[each.event] for each in scored])
    best = [each.right[mean.argmax()] for each, mean in pairs]
    firm = np.array([not each.known for each in scored])
    briers = [(mean**2).sum() - 2 * mean @ each.right + 1 for each, mean in pairs]
    logs = [-each.right @ np.log(np.maximum(mean, _LEAST)) for each, mean in pairs]
    distances = [0.5 * np.abs(mean - each.right).sum() for each, mean in pairs if each.known]
    return {
        "questions": len(scored),
        "right": float(np.mean(best)),
        "ece": ece(shares, right),
        "ece_by_chance": _by_chance(shares, firm),
        "brier": float(np.mean(briers)),
        "brier_at_best": float(np.mean([1 - each.right @ each.right for each in scored])),
        "log_loss": float(np.mean(logs)),
        "distance": float(np.mean(distances)) if distances else None,
        "bins": _bins(shares, right),
    }


def ece(shares: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error of probabilities `[questions]`: the mean of |mean probability − share of
    right answers| over bins of equal width, weighted by the number of questions in each bin (Guo et al., 2017).
    """
    places = _place(shares)
    gaps = np.bincount(places, shares - right, BINS)
    return float(np.abs(gaps).sum() / len(shares))


def _by_chance(shares: np.ndarray, firm: np.ndarray) -> Json:
    """Return the calibration error that perfect probabilities would show by chance: its mean and 95th percentile over
    simulated answers. `firm` marks questions that have one right option. Only their answers are simulated; all other
    questions add no error."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(_SIMULATED if firm.any() else 1):
        drawn = (random.random(len(shares)) < shares).astype(float)
        found.append(ece(shares, np.where(firm, drawn, shares)))
    return {"mean": float(np.mean(found)), "p95": float(np.percentile(found, 95))}


def _bins(shares: np.ndarray, right: np.ndarray) -> list[Json]:
    """Return the bins that contain questions, and Wilson's 95% interval of each bin's share of right answers."""
    places = _place(shares)
    found = []
    for number in range(BINS):
        inside = places == number
        count = int(inside.sum())
        if count:
            share = float(right[inside].mean())
            found.append(
                {
                    "from": number / BINS,
                    "questions": count,
                    "probability": float(shares[inside].mean()),
                    "right": share,
                    "interval": wilson(share * count, count),
                }
            )
    return found


def _place(shares: np.ndarray) -> np.ndarray:
    return np.minimum((shares * BINS).astype(np.int64), BINS - 1)


def _mean(scored: Scored, temperature: float) -> np.ndarray:
    return np.asarray(tempered(scored.draws, temperature).mean(axis=0))


def fit_temperatures(scored: Sequence[Scored]) -> dict[str, float]:
    """Return type of question → the temperature that has the smallest log loss."""
    found = {}
    for kind in TYPES:
        own = [each for each in scored if each.type == kind]
        if own:
            found[kind] = _fit(own)
    return found


def cross_fitted(scored: Sequence[Scored]) -> list[Scored]:
    """Return the answers at cross-fitted temperatures: the questions are halved, and each half uses temperatures that
    were fitted on the other half."""
    halves = _halves(scored)
    found: list[Scored | None] = [None] * len(scored)
    for half in (0, 1):
        other = [each for each, its in zip(scored, halves, strict=True) if its != half]
        temperatures = fit_temperatures(other)
        for i, each in enumerate(scored):
            if halves[i] == half:
                draws = tempered(each.draws, temperatures.get(each.type, 1.0))
                found[i] = Scored(each.type, each.group, draws, each.right)
    return [each for each in found if each is not None]


def _halves(scored: Sequence[Scored]) -> list[int]:
    """Return the half, 0 or 1, that each question is in. The halves alternate within every type and group, so that both
    halves contain every type and group, even if a file repeats types and groups in a regular order."""
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for each in scored:
        found.append(counts[each.type, each.group] % 2)
        counts[each.type, each.group] += 1
    return found


def _fit(scored: Sequence[Scored]) -> float:
    def loss(log_temperature: float) -> float:
        temperature = float(np.exp(log_temperature))
        return sum(
            float(-each.right @ np.log(np.maximum(_mean(each, temperature), _LEAST)))
            for each in scored
        )

    return round(float(np.exp(_lowest(loss, np.log(_COLDEST), np.log(_HOTTEST)))), 3)


def _lowest(loss: Callable[[float], float], low: float, high: float) -> float:
    """Return where a unimodal function has its minimum, found by golden-section search."""
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = loss(left), loss(right)
    for _ in range(_ROUNDS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = loss(right)
    return (low + high) / 2
