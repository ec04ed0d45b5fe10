"""Converts a request's tensors to a request for the runtime: plain text, text under a grammar, infilling, or
decisions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from canvasrt.chat_tokens import CALL, THOUGHT, THOUGHT_END
from canvasrt.containers.tensors import MAX_CANVAS, MAX_ECHOED, OPTIONS
from canvasrt.containers.triton.grammar import read_grammar
from canvasrt.containers.triton.inputs import (
    check_stops,
    read_bias,
    read_inputs,
    read_json,
    read_messages,
    read_object,
)
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.containers.triton.prompt_encoder import PromptEncoder
from canvasrt.containers.triton.replies import JsonReply, PromptScores, Replies, ReplyBuilder
from canvasrt.containers.triton.shared import Shared
from canvasrt.defaults import SOFT_TOKENS
from canvasrt.errors import CanvasError
from canvasrt.runtime.answers.constrained import ConstrainedRequest
from canvasrt.runtime.answers.grammar import GrammarState
from canvasrt.runtime.answers.infill import filled, infill_request
from canvasrt.runtime.answers.layout import Ask, end_of_answer
from canvasrt.runtime.conditions import Conditions, read_conditions
from canvasrt.runtime.model import Model
from canvasrt.runtime.pictures import Picture, check_places, insert, read_pictures
from canvasrt.runtime.prefix import share_of
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import LEAST_WORK, SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer

# Preprocessed images, which the `n` answers of a request share.
_seen = Shared[list[Picture]](
    16, 64 * 2**20, lambda pictures: sum(each.pixels.nbytes for each in pictures)
)


# Log-probabilities of echoed prompts, which the `n` answers of a request share.
_echoed: WeakValueDictionary[bytes, PromptScores] = WeakValueDictionary()


class ServedRequest(NamedTuple):
    """A request for the runtime, and the object that converts its events to replies."""

    request: Request
    replies: Replies


def read_request(
    arrays: Mapping[str, np.ndarray],
    model: Model,
    encoder: PromptEncoder,
    options: ModelOptions,
    owner: str = "",
    answers: int = 1,
    only_final: bool = False,
) -> ServedRequest:
    """Convert tensors to a request. Raises CanvasError with the name of an invalid tensor, and for a request beyond
    the operator's limits.

    `answers`: total number of answers that the caller requested. `only_final`: only the result is sent.
    """
    values = read_inputs(arrays)
    reader = _Reader(values, model, encoder, options, owner)
    # Check options before the prompt, because encoding a long prompt is expensive.
    params = reader.params()
    conditions = read_conditions_of(values)
    if "questions" in values:
        return reader.decisions()
    if "infill" in values:
        return reader.infill(params)
    params.check_limits(model.config, answers, options.max_steps, options.max_passes)
    return reader.text(params, conditions, only_final, answers)


@dataclass(frozen=True)
class _Reader:
    """Converts one request of the caller `owner`. `values` are the request's inputs, keyed by tensor name."""

    values: Mapping[str, Any]
    model: Model
    encoder: PromptEncoder
    options: ModelOptions
    owner: str

    @property
    def _echo_only(self) -> bool:
        return bool(self.values.get("echo")) and self.values.get("max_new_tokens") == 0

    def params(self) -> SamplingParams:
        given = {tensor.name: self.values.get(tensor.name) for tensor in OPTIONS}
        if "logit_bias" in self.values:
            given["logit_bias"] = read_bias(self.values["logit_bias"])
        if self._echo_only:  # generate only one token, which the replies leave out
            given |= LEAST_WORK
        given["logprob_token_ids"] = tuple(map(int, self.values.get("logprob_token_ids", ())))
        more = tuple(map(int, self.values.get("stop_token_ids", ())))
        if "grammar" in self.values and (more or self.values.get("ignore_eos")):
            name = "stop_token_ids" if more else "ignore_eos"
            raise CanvasError(f"{name} is not supported with a grammar", f"leave out {name}")
        if more or self.values.get("ignore_eos"):
            ends = () if self.values.get("ignore_eos") else self.model.config.eos_token_ids
            given["eos_token_ids"] = (*ends, *more)
        return SamplingParams.from_defaults(self.model.sampler, self.model.config, **given)

    def text(
        self, params: SamplingParams, conditions: Conditions | None, only_final: bool, answers: int
    ) -> ServedRequest:
        """Return a request for text, optionally under a grammar."""
        tokenizer = self.encoder.tokenizer
        stops = self._stops()
        prompt, pictures, opening = self._prompt()
        start = None
        if "grammar" in self.values:
            start = read_grammar(self.values["grammar"], self.model, tokenizer, self.owner)
            prompt, opening = _after_thought(prompt, opening, start, tokenizer)
        room = self.model.max_context - len(prompt)
        params = params.fitted(
            self.model.config, room, self.model.canvas_sizes, "max_new_tokens" not in self.values
        )
        echo = bool(self.values.get("echo"))
        wanted = None
        if echo and params.logprobs:
            _check_echo(len(prompt), params, answers)
            wanted = self._scores(prompt, pictures, params)
        request = Request(prompt, params, pictures, self.owner, conditions, wanted)
        if start is not None:
            if wanted is not None:
                why = "echo is not supported with log-probabilities and a grammar"
                raise CanvasError(why, "leave out echo")
            call = str(self.values.get("prefix", "")).startswith(CALL)
            if call and params.max_new_tokens <= start.least:
                raise CanvasError(
                    f"max_new_tokens is {params.max_new_tokens}, too few for a complete tool call",
                    f"give at least {start.least + 1}",
                )
            end = end_of_answer(self.model, tokenizer)
            request = ConstrainedRequest(prompt, params, pictures, self.owner, start=start, end=end)
        control = bool(self.values.get("control"))
        if echo and tokenizer is not None:
            # Decoding fails on invalid tokens.
            request.validate(self.model.config, self.model.max_context)
            opening = str(self.values.get("prompt") or tokenizer.decode(list(map(int, prompt))))
        replies = ReplyBuilder(
            tokenizer,
            params,
            bool(self.values.get("drafts")),
            only_final=only_final,
            stops=stops,
            prompt=prompt,
            control=control,
            opening=opening if control or echo else "",
            prompt_scores=wanted,
            silent=self._echo_only,
        )
        return ServedRequest(request, replies)

    def _scores(
        self,
        prompt: Sequence[int] | np.ndarray,
        pictures: Sequence[Picture],
        params: SamplingParams,
    ) -> PromptScores:
        """Return a prompt's `PromptScores`. A caller's requests for the same log-probabilities share them."""
        wanted = (share_of(self.owner), params.top_logprobs, params.logprob_token_ids)
        key = hashlib.sha256(f"{wanted}".encode() + np.asarray(prompt, "<i8").tobytes())
        key.update(b"".join(each.digest for each in pictures))
        return _echoed.setdefault(key.digest(), PromptScores())

    def infill(self, params: SamplingParams) -> ServedRequest:
        """Return a request that fills a text's gaps. The gaps determine the number of passes."""
        tokenizer, options = self.encoder.tokenizer, self.options
        self._refuse(("grammar",), "infill")
        self._stops()
        prompt, pictures, _ = self._prompt()
        if tokenizer is None:
            raise CanvasError(
                "the model has no tokenizer, so it cannot fill gaps", "leave out infill"
            )
        text = self.values["infill"]
        request = infill_request(text, prompt, params, self.model, tokenizer, pictures)
        ways = len(request.canvases)
        request.params.check_limits(self.model.config, ways, options.max_steps, options.max_passes)
        replies = JsonReply(lambda result: filled(result, tokenizer))
        return ServedRequest(replace(request, owner=self.owner), replies)

    def decisions(self) -> ServedRequest:
        """Return a request that answers closed questions. If a question is invalid, raises CanvasError, which
        names its path."""
        values, tokenizer = self.values, self.encoder.tokenizer
        self._refuse(("infill", "grammar", "template", "prefix"), "questions")
        self.encoder.check(values)
        pictures = self._pictures()
        if tokenizer is None or not tokenizer.has_template:
            raise CanvasError(
                "questions need a tokenizer with a chat template", "send a prompt alone"
            )
        if "prompt_ids" in values or values.get("raw"):
            raise CanvasError("questions are asked about a chat", "send prompt or messages")
        data = read_json(
            "questions", values["questions"], "send a JSON list of questions, or an object"
        )
        ask = Ask.from_json({"questions": data} if isinstance(data, list) else data)
        if "messages" in values:
            messages = read_messages(values["messages"])
        else:
            messages = [{"role": "user", "content": values["prompt"]}]
        seed = int(values.get("seed") or 0)
        request = ask.request(messages, self.model, tokenizer, seed, pictures)
        request.check_limits(self.options.max_steps, self.options.max_passes)
        replies = JsonReply(lambda result: {"answers": ask.answers(result.draws)})
        return ServedRequest(replace(request, owner=self.owner), replies)

    def _refuse(self, names: Sequence[str], what: str) -> None:
        """Raise CanvasError if one of the inputs `names` is given: `what` would ignore it."""
        for name in names:
            if name in self.values:
                raise CanvasError(f"{name} has no effect with {what}", f"leave out {name}")

    def _stops(self) -> tuple[str, ...]:
        stops = check_stops(self.values.get("stop") or ())
        if stops and self.encoder.tokenizer is None:
            raise CanvasError(
                "the model has no tokenizer, so it cannot find stop strings", "leave out stop"
            )
        return stops

    def _prompt(self) -> tuple[Sequence[int] | np.ndarray, list[Picture], str]:
        """Return the prompt with expanded image tokens, the images, and the `opening` of an `EncodedPrompt`."""
        encoded, opening = self.encoder.encode(self.values, self.owner)
        pictures = self._pictures(encoded)
        if not pictures:
            return encoded, [], opening
        return insert(encoded.tolist(), pictures, self.model.config), pictures, opening

    def _pictures(self, prompt: np.ndarray | None = None) -> list[Picture]:
        """Return the images as patches. Checks as much as possible before decoding."""
        files = self.values.get("images", [])
        budgets = [int(most) for most in self.values.get("image_tokens", ())] or [SOFT_TOKENS]
        if not files:
            return []
        self.model.check_vision()
        if len(budgets) not in (1, len(files)):
            raise CanvasError(
                f"image_tokens has {len(budgets)} numbers, but the request has {len(files)} images",
                "send one number for all images, or one per image",
            )
        budgets = budgets * len(files) if len(budgets) == 1 else budgets
        # Images usually take nearly all of their budget. The exact sum is checked after preprocessing.
        if sum(budgets) // 2 > self.model.max_context:
            raise CanvasError(
                f"{len(files)} images exceed the context of {self.model.max_context} tokens",
                "send fewer images, or fewer image_tokens",
            )
        if prompt is not None:
            check_places(prompt.tolist(), len(files), self.model.config)
        vision = self.model.config.vision
        assert vision is not None
        digest = hashlib.sha256(share_of(self.owner).encode() + b"\n")
        for file, budget in zip(files, budgets, strict=True):
            digest.update(f"{budget} {len(file)} ".encode() + file)
        return _seen.get(digest.digest(), lambda: read_pictures(files, vision, budgets))


def _after_thought(
    prompt: Sequence[int] | np.ndarray,
    opening: str,
    start: GrammarState,
    tokenizer: Tokenizer | None,
) -> tuple[Sequence[int] | np.ndarray, str]:
    """Return a prompt and its `opening`. If the template has begun a thought, and the grammar has no token to end
    it, this ends the thought; otherwise the whole answer would be a thought."""
    end = tokenizer.control_id(THOUGHT_END) if tokenizer and opening else None
    if end is None or THOUGHT_END in opening or not opening.startswith(THOUGHT):
        return prompt, opening
    if end in start.copy().allowed():
        return prompt, opening
    return [*map(int, prompt), end], opening + THOUGHT_END


def _check_echo(tokens: int, params: SamplingParams, answers: int) -> None:
    """Raise CanvasError if all answers together have more than MAX_ECHOED log-probabilities of echoed prompts."""
    each = 1 + (len(params.logprob_token_ids) or params.top_logprobs)
    if (count := tokens * each * answers) > MAX_ECHOED:
        raise CanvasError(
            f"echo of {tokens} tokens in {answers} answers, with {each} log-probabilities per token, gives {count} in total",
            f"at most {MAX_ECHOED} are allowed: ask for fewer per token or for fewer answers, or shorten the prompt",
        )


def read_conditions_of(values: Mapping[str, Any]) -> Conditions | None:
    """Return the request's conditions on positions, if any."""
    if "canvas" not in values:
        return None
    for name in ("questions", "grammar", "infill"):
        if name in values:
            raise CanvasError(f"canvas is not supported with {name}", f"leave out {name}")
    if (size := len(values["canvas"])) > MAX_CANVAS:
        raise CanvasError(f"canvas has {size} characters of JSON", f"send at most {MAX_CANVAS}")
    return read_conditions(read_object("canvas", values["canvas"], 'send {"pin": {"0": 17}}'))
