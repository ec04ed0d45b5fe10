"""Inputs and outputs of passes, and counters of passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from canvasrt.errors import EngineError

# A row is a request's state, from `Model.new_row`. Hidden states are an array, or the `next_hidden` of an earlier step.
Row = Any
Hidden = Any
# `tokens`: the head's outputs. `hidden`: the last layer's output, without running the head. `both`: all of these.
Outputs = Literal["tokens", "hidden", "both"]


@dataclass(frozen=True)
class EncodeInput:
    """Clean tokens to add to a request's cache."""

    row: Row
    tokens: np.ndarray  # int64 [n], n >= 1
    # The number of the image that each token belongs to, or -1 for text: int64 [n]. None if all tokens are text.
    groups: np.ndarray | None = None
    features: np.ndarray | None = (
        None  # float32 [image tokens, hidden_size]; replaces image tokens' embeddings
    )
    # A callback that receives the last layer's output, float32 [n, hidden_size], and returns whether the tokens stay in
    # the cache. If the model splits the tokens because they overload an expert, only the last part's output is passed.
    keep: Callable[[np.ndarray], bool] | None = None
    # Whether `keep` needs the outputs of all tokens. The tokens are then split only if they exceed the model's largest
    # pass without overflow. If they are split, `keep` must return True.
    whole: bool = False

    def halves(self) -> tuple[EncodeInput, EncodeInput]:
        """Return the tokens in two parts, which are encoded one after the other."""
        middle, keep, seen = (len(self.tokens) + 1) // 2, self.keep, list[np.ndarray]()
        first = replace(self, tokens=self.tokens[:middle], keep=None)
        second = replace(self, tokens=self.tokens[middle:])
        if keep is None or not self.whole:
            return first, second

        def collect(hidden: np.ndarray) -> bool:
            seen.append(hidden)
            return True

        def join(hidden: np.ndarray) -> bool:
            return keep(np.concatenate([*seen, hidden]))

        return replace(first, keep=collect), replace(second, keep=join)


@dataclass(frozen=True)
class DenoiseInput:
    """One request's part of a denoising pass."""

    row: Row
    hidden: Hidden  # float32 [canvas, hidden_size] in the first step, then the previous step's `next_hidden`
    temperature: np.float32
    entropy_bound: float
    uniforms: np.ndarray  # float32 [canvas]
    noise: np.ndarray  # int64 [canvas]
    outputs: Outputs = "tokens"


def _none() -> np.ndarray:
    return np.empty(0)


@dataclass(frozen=True)
class DenoiseOutput:
    """One request's result of a denoising pass. Arrays are `[canvas]`, except for hidden states. If the head did not
    run, only `hidden` is set."""

    canvas: np.ndarray = field(default_factory=_none)  # int64, the next step's tokens
    argmax: np.ndarray = field(default_factory=_none)  # int64
    entropy: np.ndarray = field(default_factory=_none)  # float32, nats
    accepted: np.ndarray = field(default_factory=_none)  # bool
    next_hidden: Hidden = None  # float32 [canvas, hidden_size], or a handle to states on a device
    # float32 [canvas, hidden_size], the last layer's output if requested
    hidden: np.ndarray | None = None


def hidden_input(row: Row, hidden: Hidden) -> DenoiseInput:
    """Return the input of a pass that runs only the layers, because the host samples the tokens."""
    length = len(hidden)
    blank = np.zeros(length, np.float32), np.zeros(length, np.int64)
    return DenoiseInput(row, hidden, np.float32(1), 0.0, *blank, outputs="hidden")


def check_finite(values: np.ndarray, what: str) -> None:
    """Raise EngineError if a value is not finite, because tokens that depend on it would be arbitrary."""
    if not np.isfinite(values).all():
        bad = np.count_nonzero(~np.isfinite(values))
        raise EngineError(
            f"{bad} of the {values.size} {what} that the engines returned are not finite",
            "check the bundle with `canvasrt verify`, and the GPU's memory with `nvidia-smi -q`",
            fatal=True,
        )


@dataclass(frozen=True)
class Saved:
    """Keys and values of a prompt's chunk, for requests that begin with the same tokens."""

    tokens: int
    data: Any  # the model's own representation


@dataclass
class Counters:
    """Counters of a model's passes so far. Seconds are wall time inside the passes."""

    encode_passes: int = 0
    encode_tokens: int = 0
    cached_tokens: int = 0  # tokens that came from the prefix cache instead of a pass
    encode_seconds: float = 0.0
    denoise_passes: int = 0
    denoise_seconds: float = 0.0
    overflows: int = 0
    images: int = 0
    failed_passes: int = 0
