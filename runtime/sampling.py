"""A request's sampling parameters, with their limits, and the temperature schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from canvasrt.checkpoints.config import ModelConfig, SamplerDefaults
from canvasrt.errors import CanvasError
from canvasrt.runtime.noise import MAX_SEED


@dataclass(frozen=True)
class SamplingParams:
    """How one request is generated. Entropies are in nats."""

    seed: int = 0
    max_new_tokens: int = 256
    max_denoising_steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    eos_token_ids: tuple[int, ...] = ()
    adaptive_stop: bool = True

    @classmethod
    def from_defaults(
        cls, defaults: SamplerDefaults, config: ModelConfig, **overrides: Any
    ) -> SamplingParams:
        """The checkpoint's defaults with `overrides` over them (None leaves the default), validated."""
        names = {field.name for field in fields(cls)}
        values = {name: getattr(defaults, name) for name in names if hasattr(defaults, name)}
        values["eos_token_ids"] = config.eos_token_ids
        for name, value in overrides.items():
            if name not in names:
                raise CanvasError(
                    f"unknown sampling parameter {name!r}",
                    f"the parameters are {', '.join(sorted(names))}",
                )
            if value is not None:
                values[name] = value
        values["eos_token_ids"] = tuple(_ids(values["eos_token_ids"]))
        params = cls(**values)
        params.validate(config)
        return params

    def blocks(self, canvas_length: int) -> int:
        """The most blocks that this request may take."""
        return -(-self.max_new_tokens // canvas_length)

    def temperature(self, step: int) -> np.float32:
        """The temperature of denoising step `step`, counted from 1 (t_max's end) to
        `max_denoising_steps`; in the reference's float32 order of operations."""
        remaining = self.max_denoising_steps - step + 1
        fraction = np.float32(remaining) / np.float32(self.max_denoising_steps)
        return np.float32(self.t_max - self.t_min) * fraction + np.float32(self.t_min)

    def validate(self, config: ModelConfig) -> None:
        """Raises CanvasError, naming the parameter and its value, where one is out of range."""
        _integer("seed", self.seed, 0, MAX_SEED)
        _integer("max_new_tokens", self.max_new_tokens, 1, config.max_position_embeddings)
        _integer("max_denoising_steps", self.max_denoising_steps, 1, 10_000)
        _integer("stability_threshold", self.stability_threshold, 0, 10_000)
        _real("entropy_bound", self.entropy_bound)
        _real("confidence_threshold", self.confidence_threshold)
        _real("t_min", self.t_min, zero=True)
        _real("t_max", self.t_max)
        if self.t_max < self.t_min:
            raise CanvasError(
                f"t_max {self.t_max} is below t_min {self.t_min}",
                "the temperature falls from t_max to t_min: give t_max >= t_min",
            )
        for token in self.eos_token_ids:
            _integer("an end-of-sequence token", token, 0, 2**31 - 1)


def _ids(value: int | Iterable[int]) -> Iterable[int]:
    return (value,) if isinstance(value, int) else value


def _integer(name: str, value: Any, low: int, high: int) -> None:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not low <= value <= high:
        raise CanvasError(
            f"{name} is {value!r}", f"give a whole number from {low} to {high} for {name}"
        )


def _real(name: str, value: Any, zero: bool = False) -> None:
    real = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        sign = "of 0 or more" if zero else "above 0"
        raise CanvasError(f"{name} is {value!r}", f"give a finite number {sign} for {name}")
