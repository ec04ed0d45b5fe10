"""A request's sampling parameters, from which Triton's inputs, the OpenAI API and the command line are derived.

Does not import NumPy when it is loaded, because the command line reads this module for its help.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from canvasrt.checkpoints.config import ModelConfig, SamplerDefaults
from canvasrt.errors import CanvasError
from canvasrt.pass_shapes import canvas_sizes

if TYPE_CHECKING:
    import numpy as np

# At temperatures far below this one, the divided logits overflow, and the entropy becomes NaN.
COLDEST = 1e-6
MAX_BIAS = 100  # as in OpenAI's API; exceeds the difference of any two soft-capped logits
MAX_SCORE = 1000  # nats; no log-probability is below -MAX_SCORE, because logits are soft-capped
MAX_INT32, MAX_UINT64 = 2**31 - 1, 2**64 - 1
LEAST_WORK: dict[str, Any] = {"max_new_tokens": 1, "max_denoising_steps": 1}


@dataclass(frozen=True)
class Parameter:
    """One sampling parameter, as callers set it. If `most` is None, integers are at most MAX_INT32, and floats can have
    any finite size."""

    name: str
    datatype: str  # Triton's type: BOOL, FP32, INT32 or UINT64
    about: str
    least: int = 0
    most: int | None = None
    above_least: bool = False  # values must exceed `least`
    flag: str = ""  # the command line's option, if it differs from the name
    beside_text: bool = False  # asks for output in addition to the text

    @property
    def kind(self) -> type:
        """The Python type: bool, float or int."""
        kinds: dict[str, type] = {"BOOL": bool, "FP32": float}
        return kinds.get(self.datatype, int)

    @property
    def limit(self) -> float:
        """The largest allowed value."""
        if self.most is not None:
            return self.most
        return MAX_INT32 if self.kind is int else sys.float_info.max

    @property
    def option(self) -> str:
        """The command line's option."""
        return self.flag or f"--{self.name.replace('_', '-')}"

    @property
    def from_checkpoint(self) -> bool:
        """Whether the checkpoint has a default for the parameter."""
        return self.name in {each.name for each in fields(SamplerDefaults)}

    def check(self, value: Any, label: str = "") -> None:
        """Raise CanvasError for a value out of range. `label` is the parameter's name in the message."""
        label = label or self.name
        if self.kind is bool:
            valid, wanted = isinstance(value, bool), "true or false"
        elif self.kind is int:
            valid = isinstance(value, Integral) and self.least <= int(value) <= self.limit
            wanted = f"a whole number from {self.least} to {self.limit}"
        else:
            valid = isinstance(value, Real) and self._is_in_range(float(value))
            least = f"{'above' if self.above_least else 'of at least'} {self.least}"
            span = least if self.most is None else f"from {self.least} to {self.most}"
            wanted = f"a finite number {span}"
        if not valid or (self.kind is not bool and isinstance(value, bool)):
            raise CanvasError(f"{label} is {value!r}", f"give {wanted} for {label}")

    def _is_in_range(self, value: float) -> bool:
        low = value > self.least if self.above_least else value >= self.least
        return low and value <= self.limit and math.isfinite(value)


def _parameter(default: Any, datatype: str, about: str, **limits: Any) -> Any:
    """Declare a field of SamplingParams as a `Parameter`."""
    return field(default=default, metadata={"datatype": datatype, "about": about, **limits})


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request. Entropies are in nats. Raises CanvasError for a value out of range."""

    max_new_tokens: int = _parameter(256, "INT32", "maximum number of tokens to generate", least=1)
    seed: int = _parameter(0, "UINT64", "seed of the noise; 0 when absent", most=MAX_UINT64)
    canvas_length: int = _parameter(
        0,
        "INT32",
        "canvas length in tokens: the checkpoint's (also 0), an eighth, a quarter or a half of it, or "
        "-1 for the smallest of these that holds max_new_tokens",
        least=-1,
    )
    max_denoising_steps: int = _parameter(
        48,
        "INT32",
        "maximum number of denoising steps per block",
        least=1,
        most=10_000,
        flag="--steps",
    )
    entropy_bound: float = _parameter(
        0.1, "FP32", "total entropy that one step may accept, in nats", above_least=True
    )
    temperature: float = _parameter(
        1.0, "FP32", "multiplies t_min and t_max; 1 when absent, 0 takes the likeliest tokens"
    )
    top_p: float = _parameter(
        1.0,
        "FP32",
        "draw only from the smallest set of likeliest tokens whose "
        "probabilities add up to this; 1 sets no limit",
        most=1,
    )
    top_k: int = _parameter(
        0, "INT32", "draw only from the top_k likeliest tokens; 0 or -1 sets no limit", least=-1
    )
    min_p: float = _parameter(
        0.0,
        "FP32",
        "draw only tokens whose probability is at least this fraction of the likeliest token's; 0 "
        "sets no limit",
        most=1,
    )
    t_min: float = _parameter(0.4, "FP32", "temperature of the last step")
    t_max: float = _parameter(0.8, "FP32", "temperature of the first step", above_least=True)
    stability_threshold: int = _parameter(
        1, "INT32", "steps without a change after which a canvas may stop early", most=10_000
    )
    confidence_threshold: float = _parameter(
        0.005, "FP32", "mean entropy below which a canvas may stop early", above_least=True
    )
    early_stop: bool = _parameter(
        True,
        "BOOL",
        "finish a block once it is stable and confident; true when absent",
        flag="--early-stop/--all-steps",
    )
    settle_steps: int = _parameter(
        0,
        "INT32",
        "finalize the start of a canvas once it has stayed unchanged and confident for this many "
        "steps; 0 waits for the end of the block",
        most=10_000,
    )
    logprobs: bool = _parameter(
        False,
        "BOOL",
        "also return the log-probability of every token; false when absent",
        beside_text=True,
    )
    top_logprobs: int = _parameter(
        0,
        "INT32",
        "number of likeliest tokens to list with each log-probability; 0 when absent",
        most=20,
        beside_text=True,
    )
    score_blocks: bool = _parameter(
        False, "BOOL", "also return the score of every block; false when absent", beside_text=True
    )
    score_by_denoising: bool = _parameter(
        False,
        "BOOL",
        "score a block by one more denoising pass instead of its encoding pass",
    )
    redo_below: float = _parameter(
        0.0,
        "FP32",
        "redo a block with other noise if its score is below this; 0 redoes none",
        least=-MAX_SCORE,
        most=0,
    )
    max_redos: int = _parameter(
        3, "INT32", "how often a block may be redone; 3 when absent", most=16
    )
    eos_token_ids: tuple[int, ...] = ()
    # Tokens to list with each log-probability instead of the likeliest tokens.
    logprob_token_ids: tuple[int, ...] = ()
    # Pairs of a token and the number to add to its logit.
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        check_sampling(vars(self))
        for token in self.eos_token_ids:
            _EOS.check(token)
        for token, bias in self.logit_bias:
            if not (math.isfinite(bias) and abs(bias) <= MAX_BIAS):
                raise CanvasError(
                    f"logit_bias of token {token} is {bias}",
                    f"give a number from -{MAX_BIAS} to {MAX_BIAS}",
                )
        for token, count in Counter(token for token, _ in self.logit_bias).items():
            if count > 1:
                raise CanvasError(
                    f"logit_bias of token {token} is given twice", "leave out one of them"
                )

    @classmethod
    def from_defaults(
        cls,
        defaults: SamplerDefaults,
        config: ModelConfig,
        labels: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> SamplingParams:
        """Return the checkpoint's defaults, replaced by every override that is not None.

        `labels` replace parameters' names in error messages.
        """
        names = {field.name for field in fields(cls)}
        values = {name: getattr(defaults, name) for name in names if hasattr(defaults, name)}
        values["eos_token_ids"] = config.eos_token_ids
        for name, value in overrides.items():
            if name not in names:
                raise CanvasError(
                    f"unknown sampling parameter {name!r}",
                    f"give one of {', '.join(sorted(names))}",
                )
            if value is not None:
                values[name] = value
        ends = values["eos_token_ids"]
        values["eos_token_ids"] = (ends,) if isinstance(ends, int) else tuple(ends)
        check_sampling(values, labels)
        return cls(**values)

    def canvas(self, config: ModelConfig, tokens: int | None = None) -> int:
        """Return the length of a canvas. If `canvas_length` is -1, this is the smallest length that holds `tokens` (by
        default `max_new_tokens`), or the largest length if none does. Raises CanvasError for an unsupported length."""
        sizes = canvas_sizes(config.canvas_length)
        if self.canvas_length == 0:
            return config.canvas_length
        if self.canvas_length == -1:
            least = self.max_new_tokens if tokens is None else tokens
            return next((size for size in sizes if size >= least), config.canvas_length)
        if self.canvas_length not in sizes:
            raise CanvasError(
                f"canvas_length is {self.canvas_length}",
                f"give one of {', '.join(map(str, sizes))}, 0 for {config.canvas_length}, or -1 for the "
                "smallest that holds max_new_tokens",
            )
        return self.canvas_length

    def blocks(self, config: ModelConfig) -> int:
        """Return the maximum number of blocks of this request."""
        return -(-self.max_new_tokens // self.canvas(config))

    def fitted(
        self, config: ModelConfig, room: int, sizes: Iterable[int], is_default: bool = False
    ) -> SamplingParams:
        """Reduce `max_new_tokens` to fit `room` positions, if it is a default, or if its canvases exceed `room` by less
        than one canvas. If no canvas of the default length fits, use the largest length in `sizes` that fits."""
        canvas, length = self.canvas(config), self.canvas_length
        lacking, fitting = self.blocks(config) * canvas - room, room // canvas * canvas
        if fitting <= 0 and not length:
            length = fitting = max((each for each in sizes if each <= room), default=0)
        if lacking <= 0 or fitting <= 0 or (lacking >= canvas and not is_default):
            return self
        return replace(self, canvas_length=length, max_new_tokens=min(self.max_new_tokens, fitting))

    def check_limits(
        self, config: ModelConfig, answers: int, max_steps: int | None, max_passes: int | None
    ) -> None:
        """Raise CanvasError if the request exceeds the operator's limits: denoising steps per block, and passes of all
        answers together. None means no limit."""
        steps = self.max_denoising_steps
        if max_steps is not None and steps > max_steps:
            raise CanvasError(f"max_denoising_steps is {steps}", f"ask for at most {max_steps}")
        tries = 1 + self.max_redos if self.redo_below < 0 else 1
        passes = self.blocks(config) * steps * answers * tries
        if max_passes is not None and passes > max_passes:
            raise CanvasError(
                f"the request may take {passes} denoising passes",
                f"at most {max_passes} are allowed: ask for fewer tokens, steps, answers or redos",
            )

    def temperature_at(self, step: int) -> np.float32:
        """Return the temperature of denoising step `step`, which counts from 1.

        It falls from t_max in step 1 to almost t_min in the last step. It is computed with the reference's float32
        operations in the same order, then multiplied by `temperature`. The result is at least COLDEST, because lower
        temperatures would make logits overflow.
        """
        import numpy as np

        remaining = self.max_denoising_steps - step + 1
        fraction = np.float32(remaining) / np.float32(self.max_denoising_steps)
        scheduled = np.float32(self.t_max - self.t_min) * fraction + np.float32(self.t_min)
        if self.temperature == 1:
            return scheduled
        return max(np.float32(self.temperature) * scheduled, np.float32(COLDEST))

    @property
    def scores(self) -> bool:
        """Whether blocks are scored."""
        return self.score_blocks or self.redo_below < 0

    @property
    def restricts(self) -> bool:
        """Whether only some tokens can be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @cached_property
    def on_host(self) -> tuple[str, ...]:
        """The names of the parameters in use that the host applies, because engines do not support them."""
        given = {
            "top_p": self.top_p < 1,
            "top_k": self.top_k > 0,
            "min_p": self.min_p > 0,
            "logit_bias": bool(self.logit_bias),
        }
        return tuple(name for name, used in given.items() if used)

    def check_fits(self, config: ModelConfig, labels: Mapping[str, str] | None = None) -> None:
        """Raise CanvasError if `max_new_tokens` exceeds the model's positions, or if a token of `logit_bias` or
        `logprob_token_ids` is not in the vocabulary."""
        biased = [token for token, _ in self.logit_bias]
        for name, tokens in (("logit_bias", biased), ("logprob_token_ids", self.logprob_token_ids)):
            foreign = [each for each in tokens if not 0 <= each < config.vocab_size]
            if foreign:
                raise CanvasError(
                    f"{name} names token {foreign[0]}",
                    f"give token ids from 0 to {config.vocab_size - 1}",
                )
        most = config.max_position_embeddings
        if self.max_new_tokens > most:
            label = (labels or {}).get("max_new_tokens", "max_new_tokens")
            raise CanvasError(
                f"{label} is {self.max_new_tokens}",
                f"give a whole number from 1 to {most} for {label}, minus the tokens of the prompt",
            )


PARAMETERS = tuple(
    Parameter(each.name, **each.metadata) for each in fields(SamplingParams) if each.metadata
)
_EOS = Parameter("an end-of-sequence token", "INT32", "")


def check_sampling(values: Mapping[str, Any], labels: Mapping[str, str] | None = None) -> None:
    """Raise CanvasError for the first value that is out of range or contradicts another.

    `values` are keyed by name. `labels` replace parameters' names in error messages.
    """
    called = {each.name: each.name for each in PARAMETERS} | dict(labels or {})
    for parameter in PARAMETERS:
        if parameter.name in values:
            parameter.check(values[parameter.name], called[parameter.name])
    _check_temperatures(values, called)
    for name in ("top_logprobs", "logprob_token_ids"):
        if values.get(name) and not values.get("logprobs"):
            raise CanvasError(
                f"{called.get(name, name)} is {values[name]} without {called['logprobs']}",
                f"add {called['logprobs']}",
            )
    settle = f"{called['settle_steps']} is {values.get('settle_steps')}"
    if values.get("settle_steps") and (values.get("redo_below") or 0) < 0:
        raise CanvasError(
            f"{settle} and {called['redo_below']} is {values['redo_below']}: a token that has "
            "settled cannot be taken back",
            "leave out one of them",
        )
    if values.get("settle_steps") and values.get("early_stop") is False:
        raise CanvasError(
            f"{settle}, but early stopping is off: a block ends early once all its tokens settle",
            f"leave out {called['settle_steps']}, or turn on {called['early_stop']}",
        )


def _check_temperatures(values: Mapping[str, Any], called: Mapping[str, str]) -> None:
    low, high, steps = (values.get(each) for each in ("t_min", "t_max", "max_denoising_steps"))
    if low is None or high is None:
        return
    t_min, t_max = called["t_min"], called["t_max"]
    if high < low:
        raise CanvasError(
            f"{t_max} {high} is below {t_min} {low}",
            f"the temperature falls from {t_max} to {t_min}: give {t_max} >= {t_min}",
        )
    last = (high - low) / steps + low if steps else COLDEST
    if last < COLDEST:
        raise CanvasError(
            f"{t_max} {high!r} leads to a temperature of {last:.3g} in the last step",
            f"raise {t_max} or {t_min}: the minimum temperature is {COLDEST:g}",
        )
