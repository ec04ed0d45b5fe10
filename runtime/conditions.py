"""Conditions on single positions of an answer: initial, fixed or allowed tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError

_FIELDS = ("seed", "pin", "allow", "least")
MAX_ALLOWED = 65_536  # maximum number of tokens in `allow`, over all positions
_EXAMPLE = 'give {"seed": [17, null], "pin": {"2": 9}, "allow": {"3": [9, 17]}}'


@dataclass(frozen=True)
class Conditions:
    """Conditions on the answer's positions, which are counted from 0 across canvases.

    seed: tokens that replace noise in a block's first canvas. pin: fixed tokens, in every step and in the answer.
    allow: the permitted tokens, ascending. least: minimum number of tokens before the end.

    At positions before `least` or before the last pin, tokens that end the sequence are not allowed, unless the
    position's own `pin` or `allow` contains them.
    """

    seed: Mapping[int, int] = field(default_factory=dict)
    pin: Mapping[int, int] = field(default_factory=dict)
    allow: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    least: int = 0

    @property
    def restricts(self) -> bool:
        """Whether conditions apply to all steps, not only to a block's first canvas."""
        return bool(self.pin or self.allow or self.least)

    def check(self, config: ModelConfig, budget: int, room: int, ends: Sequence[int]) -> None:
        """Raise CanvasError for positions beyond the canvases, unknown tokens, and contradictory conditions. The error
        names the path of the mistake.

        budget: maximum number of tokens of the answer. room: number of positions in all its canvases. ends: the tokens
        that end the sequence.
        """
        for name, given in (("seed", self.seed), ("pin", self.pin), ("allow", self.allow)):
            for position, value in given.items():
                path = f"canvas.{name}.{position}"
                if not 0 <= position < room:
                    raise CanvasError(
                        f"{path} is out of range", f"give positions from 0 to {room - 1}"
                    )
                tokens = value if isinstance(value, tuple) else (value,)
                if not tokens:
                    raise CanvasError(f"{path} allows no token", "list at least one")
                foreign = [token for token in tokens if not 0 <= token < config.vocab_size]
                if foreign:
                    raise CanvasError(
                        f"{path} names token {foreign[0]}",
                        f"give token ids from 0 to {config.vocab_size - 1}",
                    )
        if not 0 <= self.least <= budget:
            raise CanvasError(
                f"canvas.least is {self.least}", f"give a whole number from 0 to {budget}"
            )
        self._check_agreement(ends)

    def _check_agreement(self, ends: Sequence[int]) -> None:
        for position, token in self.pin.items():
            path = f"canvas.pin.{position}"
            if token not in self.allow.get(position, (token,)):
                raise CanvasError(
                    f"{path} is {token}, which canvas.allow.{position} does not list",
                    "leave out one of them",
                )
            if token in ends and position < max(self.pin):
                raise CanvasError(
                    f"{path} ends the answer before canvas.pin.{max(self.pin)}",
                    "leave out one of them",
                )
        for position, token in self.seed.items():
            if token != self.pin.get(position, token):
                raise CanvasError(
                    f"canvas.seed.{position} is {token}, which canvas.pin.{position} rules out",
                    "leave out one of them",
                )

    def allowed(
        self, begin: int, length: int, vocab_size: int, ends: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """Return, for each restricted position of a canvas, its allowed tokens, int64 `[k]`. Keys count from the
        canvas's first position. `begin` is the position in the answer at which the canvas starts."""
        last = max(max(self.pin, default=-1), self.least)
        others = np.setdiff1d(np.arange(vocab_size), ends) if begin < last and len(ends) else None
        found = {}
        # Positions with equal lists share an array, so that the sampler handles them together.
        shared: dict[tuple[int, ...], np.ndarray] = {}
        for place in range(length):
            position = begin + place
            if position in self.pin or position in self.allow:
                pinned = position in self.pin
                listed = (self.pin[position],) if pinned else self.allow[position]
                found[place] = shared.setdefault(listed, np.array(listed, np.int64))
            elif others is not None and position < last:
                found[place] = others
        return found

    def seeded(self, canvas: np.ndarray, begin: int) -> np.ndarray:
        """Return a block's first canvas, int64 `[length]`, with the tokens of `seed` inserted."""
        canvas = canvas.copy()
        for position, token in self.seed.items():
            if begin <= position < begin + len(canvas):
                canvas[position - begin] = token
        return canvas


def among(tokens: np.ndarray, allowed: Mapping[int, np.ndarray], vocab_size: int) -> np.ndarray:
    """Map tokens `[length]` that are uniform over the vocabulary to tokens that are uniform over the allowed ones."""
    if not allowed:
        return tokens
    tokens = tokens.copy()
    for place, listed in allowed.items():
        tokens[place] = listed[tokens[place] * len(listed) // vocab_size]
    return tokens


def read_conditions(data: Any) -> Conditions:
    """Parse conditions from JSON. Raises CanvasError if they are invalid; the error names the path of the mistake."""
    if not isinstance(data, Mapping):
        raise CanvasError("canvas is not an object", _EXAMPLE)
    for name in data:
        if name not in _FIELDS:
            raise CanvasError(f"canvas.{name} is unknown", f"give one of {', '.join(_FIELDS)}")
    data = {name: value for name, value in data.items() if value is not None}
    seed = data.get("seed", [])
    if not isinstance(seed, list):
        raise CanvasError("canvas.seed is not a list", "give token ids, and null for noise")
    pin = {
        position: _token(value, f"canvas.pin.{position}")
        for position, value in _by_position(data.get("pin", {}), "pin").items()
    }
    allow = {}
    for position, value in _by_position(data.get("allow", {}), "allow").items():
        path = f"canvas.allow.{position}"
        if not isinstance(value, list):
            raise CanvasError(f"{path} is not a list", "give token ids")
        allow[position] = tuple(
            sorted({_token(each, f"{path}[{n}]") for n, each in enumerate(value)})
        )
    if (count := sum(map(len, allow.values()))) > MAX_ALLOWED:
        raise CanvasError(f"canvas.allow lists {count} tokens", f"list at most {MAX_ALLOWED}")
    tokens = {
        n: _token(each, f"canvas.seed.{n}") for n, each in enumerate(seed) if each is not None
    }
    least = data.get("least", 0)
    if type(least) is not int:
        raise CanvasError(f"canvas.least is {least!r}"[:200], "give a whole number")
    return Conditions(tokens, pin, allow, least)


def _by_position(given: Any, name: str) -> dict[int, Any]:
    if not isinstance(given, Mapping):
        raise CanvasError(f"canvas.{name} is not an object", _EXAMPLE)
    found: dict[int, Any] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise CanvasError(
                f"canvas.{name}.{key[:40]} is not a position", "give whole numbers from 0"
            )
        if int(key) in found:
            raise CanvasError(f"canvas.{name}.{key} is given twice", "leave out one of them")
        found[int(key)] = value
    return found


def _token(value: Any, path: str) -> int:
    if type(value) is not int:
        raise CanvasError(f"{path} is {value!r}"[:200], "give a token id")
    return value
