"""What a caller gives the generator, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.conditions import Conditions
from canvasrt.runtime.host_head import TokenScore
from canvasrt.runtime.pictures import Picture, groups_of
from canvasrt.runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "grammar"]


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how to continue it."""

    prompt_token_ids: Sequence[int] | np.ndarray
    params: SamplingParams
    # One for each run of image tokens in the prompt.
    pictures: Sequence[Picture] = ()
    owner: str = ""  # the caller, between whom the passes are shared
    conditions: Conditions | None = None  # on the answer's positions

    def validate(self, config: ModelConfig, max_context: int) -> None:
        """Raise CanvasError for an empty or foreign prompt, or one that does not fit the context."""
        self.params.check_fits(config)
        if self.conditions is not None:
            ends = self.params.eos_token_ids
            self.conditions.check(config, self.params.max_new_tokens, ends)
        count = len(self.prompt_token_ids)
        if not count:
            raise CanvasError("the prompt is empty", "give at least one token")
        groups_of(self.prompt_token_ids, self.pictures, config)
        canvas = self.params.canvas(config)
        room = self.params.blocks(config) * canvas
        if count + room > max_context:
            raise CanvasError(
                f"the prompt of {count} tokens and {room} new ones (whole blocks of "
                f"{canvas}) exceed the context of {max_context} tokens",
                f"shorten the prompt to {max_context - room} tokens, or ask for fewer new tokens"
                if max_context > room
                else f"ask for fewer new tokens than {max_context - count}",
            )
        tokens = np.asarray(self.prompt_token_ids, np.int64)
        foreign = tokens[(tokens < 0) | (tokens >= config.vocab_size)]
        if foreign.size:
            raise CanvasError(
                f"prompt token {foreign[0]} is not in the vocabulary",
                f"give token ids from 0 to {config.vocab_size - 1}",
            )


@dataclass(frozen=True)
class BlockScore:
    """How good a block is, by the model's own account.

    score: mean log-probability of its tokens, in nats. redone: how often the block was redone.
    """

    score: float
    redone: int


@dataclass(frozen=True)
class Timings:
    """Seconds since the request was added."""

    first_block: (
        float | None
    )  # until the first finished block, whose tokens are the first final ones
    total: float


@dataclass(frozen=True)
class Result:
    """A finished request."""

    token_ids: list[int]  # the new tokens, including the first end-of-sequence token
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    seed: int
    steps: list[int]  # denoising steps per block
    timings: Timings
    cached_tokens: int = 0  # of the prompt, from the prefix cache
    logprobs: list[TokenScore] = field(default_factory=list)  # one per token, if asked for
    block_scores: list[BlockScore] = field(default_factory=list)  # one per block, if asked for


@dataclass(frozen=True)
class Draft:
    """The argmax canvas after one denoising step; `step` counts from 1.

    Its first `settled` tokens are final. `canvas` is what the next step reads: candidates where
    accepted, noise elsewhere.
    """

    id: int
    block: int
    step: int
    tokens: np.ndarray  # int64 [canvas]
    accepted: np.ndarray = field(repr=False)  # bool [canvas]
    canvas: np.ndarray | None = field(default=None, repr=False)  # int64 [canvas]
    settled: int = 0
    cached_tokens: int = 0  # of the prompt, from the prefix cache


@dataclass(frozen=True)
class Settled:
    """Tokens that became final before their block did; they follow the block's earlier ones."""

    id: int
    block: int
    step: int
    tokens: list[int]
    logprobs: list[TokenScore] = field(default_factory=list)


@dataclass(frozen=True)
class Block:
    """A finished block: its final tokens, cut at the end of sequence or the budget.

    The first `settled` of them were in Settled events already.
    """

    id: int
    block: int
    steps: int
    tokens: list[int]
    finish: FinishReason | None  # None if another block follows
    settled: int = 0
    logprobs: list[TokenScore] = field(default_factory=list)  # of the others
    score: BlockScore | None = None


@dataclass(frozen=True)
class Finished:
    """The last event of a request."""

    id: int
    result: Result


Event = Draft | Settled | Block | Finished
