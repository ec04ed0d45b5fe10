"""Requests to the generator, and the events and results that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.conditions import Conditions
from canvasrt.runtime.host_head import TokenScore
from canvasrt.runtime.model import Model
from canvasrt.runtime.pictures import Picture, groups_of
from canvasrt.runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "grammar"]


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and the parameters of its answer."""

    prompt_token_ids: Sequence[int] | np.ndarray
    params: SamplingParams
    # one picture for every run of image tokens in the prompt
    pictures: Sequence[Picture] = ()
    owner: str = ""  # the caller's name, for fair scheduling
    conditions: Conditions | None = None  # conditions on positions of the answer
    # A list to which the log-probabilities of the prompt's tokens are written; None if they are not requested. Requests
    # with the same prompt and parameters can share a list, so that every token is scored only once.
    prompt_scores: list[TokenScore] | None = None

    @property
    def new_tokens(self) -> int:
        """Maximum number of tokens that the request adds to the prompt."""
        return self.params.max_new_tokens

    def check(self, model: Model) -> None:
        """Raise CanvasError if the model can never run the request."""
        self.validate(model.config, model.max_context)
        if self.pictures:
            model.check_pictures(self.pictures)
        model.check_canvas(self.params.canvas(model.config))
        if self.params.scores:
            model.check_scores()
        if self.prompt_scores is not None:
            self.refuse(("score_blocks", "redo_below"), "log-probabilities of the prompt")
            _ = model.host_head
        if self.conditions and self.conditions.restricts:
            model.host_head.check_signal("leave out canvas.pin and canvas.allow")
        if self.params.on_host:
            model.host_head.check_signal(f"leave out {' and '.join(self.params.on_host)}")

    def validate(self, config: ModelConfig, max_context: int) -> None:
        """Raise CanvasError if the prompt is empty, has unknown tokens or does not fit the context, or if parameters or
        conditions do not fit the model."""
        self.params.check_fits(config)
        canvas = self.params.canvas(config)
        room = self.params.blocks(config) * canvas
        if self.conditions is not None:
            ends = self.params.eos_token_ids
            self.conditions.check(config, self.params.max_new_tokens, room, ends)
        taken = f"{room} new ones (whole blocks of {canvas})"
        fitting = (max_context - len(self.prompt_token_ids)) // canvas * canvas
        self.check_prompt(config, max_context, room, taken, fitting)

    def check_prompt(
        self, config: ModelConfig, max_context: int, room: int, taken: str, fitting: int = 0
    ) -> None:
        """Raise CanvasError unless the prompt is valid and leaves room for `room` more tokens.

        For error messages: `taken` describes the `room` tokens, and `fitting` is how many new tokens would fit."""
        count = len(self.prompt_token_ids)
        if not count:
            raise CanvasError("the prompt is empty", "give at least one token")
        groups_of(self.prompt_token_ids, self.pictures, config)
        if count + room > max_context:
            raise CanvasError(
                f"the prompt of {count} tokens and {taken} exceed the context of "
                f"{max_context} tokens",
                " or ".join(
                    [f"shorten the prompt to {max_context - room} tokens"] * (max_context > room)
                    + [f"ask for at most {fitting} new tokens"] * (fitting > 0)
                )
                or "shorten the prompt",
            )
        tokens = np.asarray(self.prompt_token_ids, np.int64)
        foreign = tokens[(tokens < 0) | (tokens >= config.vocab_size)]
        if foreign.size:
            raise CanvasError(
                f"prompt token {foreign[0]} is not in the vocabulary",
                f"give token ids from 0 to {config.vocab_size - 1}",
            )

    def refuse(self, names: Sequence[str], what: str) -> None:
        """Raise CanvasError if one of the parameters `names` is set: they cannot be combined with `what`."""
        for name in names:
            if getattr(self.params, name):
                raise CanvasError(
                    f"{name} is not supported together with {what}", f"leave out {name}"
                )


@dataclass(frozen=True)
class BlockScore:
    """The model's score of a block that it generated.

    score: mean log-probability of the block's tokens, in nats. redone: how often the block was redone.
    """

    score: float
    redone: int


@dataclass(frozen=True)
class Timings:
    """Seconds since the request was added."""

    first_block: float | None  # until the first block was finished, even if tokens settled earlier
    total: float


@dataclass(frozen=True)
class Result:
    """The result of a finished or cancelled request."""

    token_ids: list[int]  # the new tokens, including the first end-of-sequence token
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    seed: int
    steps: list[int]  # denoising steps per block
    timings: Timings
    cached_tokens: int = 0  # tokens of the prompt that came from the prefix cache
    logprobs: list[TokenScore] = field(default_factory=list)  # one per token, if requested
    block_scores: list[BlockScore] = field(default_factory=list)  # one per block, if requested


@dataclass(frozen=True)
class Draft:
    """A block's state after one denoising step; `step` counts from 1.

    `tokens` are the likeliest tokens, of which the first `settled` are final. `canvas` is the next step's input: the
    drawn tokens at accepted positions, and noise at all others.
    """

    id: int
    block: int
    step: int
    tokens: np.ndarray  # int64 [canvas]
    accepted: np.ndarray = field(repr=False)  # bool [canvas]
    canvas: np.ndarray | None = field(default=None, repr=False)  # int64 [canvas]
    settled: int = 0
    cached_tokens: int = 0  # tokens of the prompt that came from the prefix cache


@dataclass(frozen=True)
class Settled:
    """Tokens that became final before their block ended. They follow the tokens of the block's earlier Settled
    events."""

    id: int
    block: int
    step: int
    tokens: list[int]
    logprobs: list[TokenScore] = field(default_factory=list)


@dataclass(frozen=True)
class Block:
    """A finished block: its final tokens, cut after an end-of-sequence token or at the token limit.

    The first `settled` tokens were already in Settled events.
    """

    id: int
    block: int
    steps: int
    tokens: list[int]
    finish: FinishReason | None  # None if another block follows
    settled: int = 0
    # Log-probabilities of the tokens that did not settle earlier.
    logprobs: list[TokenScore] = field(default_factory=list)
    score: BlockScore | None = None


@dataclass(frozen=True)
class Finished:
    """The last event of a request."""

    id: int
    result: Result


Event = Draft | Settled | Block | Finished
