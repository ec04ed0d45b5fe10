"""Converts one request's events to replies: dictionaries of the decoupled model's outputs, keyed by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from canvasrt.containers.triton.stops import StopCutter
from canvasrt.runtime.host_head import TokenScore
from canvasrt.runtime.request import Block, BlockScore, Draft, Event, Finished, Result, Settled
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import REPLACEMENT, StreamDecoder, Tokenizer

Reply = dict[str, Any]


class Replies(Protocol):
    """Builds the replies to one request's events. `ended`: whether the last reply was built."""

    ended: bool

    def replies(self, event: Event) -> list[Reply]: ...


class JsonReply:
    """Builds a request's single reply, whose text is JSON. `shown` converts the result to JSON."""

    def __init__(self, shown: Callable[[Any], Mapping[str, Any]]) -> None:
        self._shown = shown
        self.ended = False

    def replies(self, event: Event) -> list[Reply]:
        """Return the reply to the last event. Earlier events get no reply."""
        self.ended = isinstance(event, Finished)
        if not isinstance(event, Finished) or event.result.finish_reason == "cancelled":
            return []
        return [json_reply(event.result, self._shown(event.result))]


def json_reply(result: Result, shown: Mapping[str, Any]) -> Reply:
    """Return a request's single reply, whose text is JSON."""
    return {
        "event": "final",
        "block": 0,
        "step": result.steps[-1] if result.steps else 0,
        "text": json.dumps(shown, ensure_ascii=False),
        "token_ids": result.token_ids,
        "prompt_token_ids": result.prompt_token_ids,
        "finish_reason": "stop",
        "steps": result.steps,
        "seed": result.seed,
        "cached_tokens": result.cached_tokens,
        "logprobs": "",
    }


class PromptScores(list[TokenScore]):
    """The log-probabilities of a prompt's tokens, which several requests can share. `shown` is their JSON, which is
    built once."""

    shown = ""


class ReplyBuilder:
    """Builds the replies of one request for text.

    A reply has all outputs except three: `canvas` is only in drafts, `block_scores` must be requested, and
    `stop_string` is only in an answer that a stop string ended. Without a tokenizer, all text is empty. `drafts`: also
    send the canvas after every step. `only_final`: send only the result. The text begins with `opening`, and is cut
    before the first stop string. `control`: keep control tokens in the text. `prompt`: the prompt's tokens.
    `prompt_scores`: holds the log-probabilities of these tokens once a block is finished. `silent`: leave out the
    answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        drafts: bool,
        only_final: bool = False,
        stops: Sequence[str] = (),
        prompt: Sequence[int] | np.ndarray = (),
        control: bool = False,
        opening: str = "",
        prompt_scores: PromptScores | None = None,
        silent: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._control, self._silent = control, silent
        self._decoder = StreamDecoder(tokenizer, control) if tokenizer else None
        self._cutter = StopCutter(stops, control, opening)
        self._seed = params.seed
        self._ends = params.eos_token_ids
        self._drafts = drafts
        self._only_final = only_final
        self._steps: list[int] = []
        self._done: list[int] = []  # final tokens
        self._opening = self._unsent = opening
        self._scores: list[str] = []  # log-probabilities as JSON
        self._unsent_scores = prompt_scores
        self._wants_scores = params.scores
        self._block_scores: list[BlockScore] = []
        self._given = ""
        self._spelt: dict[int, str] = {}
        self._named: dict[int, str] = {}  # the beginning of a token's JSON
        self._prompt = prompt
        self._cached = 0
        self.ended = False

    def replies(self, event: Event) -> list[Reply]:
        """Return the replies to an event.

        The last reply sets `ended`. If a stop string ends the answer, this happens before the generator has finished.
        """
        if isinstance(event, Finished):
            self.ended = True
            result = event.result
            return [] if result.finish_reason == "cancelled" else [self._result(result)]
        if isinstance(event, Draft):
            self._cached = event.cached_tokens
            wanted = self._drafts and not self._only_final
            return [self._draft(event)] if wanted else []
        replies = [self._settled(event) if isinstance(event, Settled) else self._block(event)]
        if self._cutter.found is not None:
            self.ended = True
            replies.append(self._stopped(event))
        return replies[1:] if self._only_final else replies

    def _draft(self, event: Draft) -> Reply:
        tokens = event.tokens.tolist()
        reply = self._reply("draft", event.block, event.step, self._text(tokens), tokens)
        canvas = tokens if event.canvas is None else event.canvas.tolist()
        view = {
            "best": [self._spell(token) for token in tokens],
            "noisy": [self._spell(token) for token in canvas],
            "accepted": event.accepted.astype(int).tolist(),
            "settled": event.settled,
            "end": len(self._words(tokens)),
        }
        return reply | {"canvas": json.dumps(view, ensure_ascii=False)}

    def _settled(self, event: Settled) -> Reply:
        text, tokens, scores = self._final(event.tokens, event.logprobs, last=False)
        if self._cutter.found is not None:
            self._steps.append(event.step)
        return self._reply("settled", event.block, event.step, text, tokens, scores=scores)

    def _block(self, event: Block) -> Reply:
        """Return the reply to a block. Its text omits the tokens that were already sent when they settled."""
        self._steps.append(event.steps)
        self._block_scores += [event.score] if event.score else []
        rest = event.tokens[event.settled :]
        last = event.finish is not None
        text, tokens, scores = self._final(rest, event.logprobs, last)
        return self._reply("block", event.block, event.steps, text, tokens, scores=scores)

    def _final(
        self, ids: Sequence[int], scores: Sequence[TokenScore], last: bool
    ) -> tuple[str, list[int], Sequence[str]]:
        """Add final tokens to the answer; return the new text, tokens and log-probabilities."""
        ids = () if self._silent else ids
        words = self._words(ids)
        text = self._decoder.put(words, final=last) if self._decoder else ""
        text = self._cutter.put(text, final=last)
        text, self._unsent = self._unsent + text, ""
        self._given += text
        tokens = list(ids)
        if self._cutter.found is not None:
            needed = self._tokens_to_stop([*self._done, *words])
            tokens = tokens[: max(0, needed - len(self._done))]
        self._done += tokens
        shown = [self._show(each) for each in scores[: len(tokens)]]
        if (unsent := self._unsent_scores) is not None:
            unsent.shown = unsent.shown or ", ".join(map(self._show, unsent))
            shown.insert(0, unsent.shown)
            self._unsent_scores = None
        self._scores += shown
        return text, tokens, shown

    def _tokens_to_stop(self, words: Sequence[int]) -> int:
        """Return the smallest number of leading tokens whose text contains the stop string."""
        assert self._cutter.found is not None
        needed = self._given + self._cutter.found
        low, high = 1, len(words)
        while low < high:
            middle = (low + high) // 2
            if (self._opening + self._text(words[:middle])).startswith(needed):
                high = middle
            else:
                low = middle + 1
        return low

    def _stopped(self, event: Block | Settled) -> Reply:
        """Return the last reply of an answer that a stop string ended."""
        made = self._reply(
            "final",
            event.block,
            self._steps[-1],
            self._given,
            self._done,
            self._prompt,
            "stop",
            self._scores,
        )
        return made | {"stop_string": self._cutter.found}

    def _result(self, result: Result) -> Reply:
        self._steps = list(result.steps)
        self._block_scores = list(result.block_scores)
        last = len(result.steps) - 1
        tokens = () if self._silent else result.token_ids
        return self._reply(
            "final",
            last,
            result.steps[last],
            self._opening + self._text(tokens),
            tokens,
            result.prompt_token_ids,
            "length" if self._silent else result.finish_reason,
            self._scores,
        )

    def _words(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens before the end token, which is not part of the answer, although it can have a text."""
        ends = (index for index, token in enumerate(tokens) if token in self._ends)
        return tokens[: next(ends, len(tokens))]

    def _spell(self, token: int) -> str:
        """Return a single token's text. If the token is one byte of a longer character, the text is meaningless."""
        if token not in self._spelt:
            self._spelt[token] = self._tokenizer.decode([token], False) if self._tokenizer else ""
        return self._spelt[token]

    def _text(self, tokens: Sequence[int]) -> str:
        words = self._words(tokens)
        return self._tokenizer.decode(words, keep_control=self._control) if self._tokenizer else ""

    def _reply(
        self,
        event: str,
        block: int,
        step: int,
        text: str,
        tokens: Sequence[int],
        prompt: Sequence[int] | np.ndarray = (),
        finish: str = "",
        scores: Sequence[str] = (),
    ) -> Reply:
        made: Reply = {
            "event": event,
            "block": block,
            "step": step,
            "text": text,
            "token_ids": tokens,
            "prompt_token_ids": prompt,
            "finish_reason": finish,
            "steps": list(self._steps),
            "seed": self._seed,
            "cached_tokens": self._cached,
            "logprobs": f"[{', '.join(scores)}]" if scores else "",
        }
        if self._wants_scores:
            made["block_scores"] = json.dumps([asdict(each) for each in self._block_scores])
        return made

    def _show(self, score: TokenScore) -> str:
        """Return a log-probability as JSON with the fields token_id, text, bytes (if the token is a part of a
        character), hidden (if answers leave the token out), logprob, step, end, and top (the likeliest tokens)."""
        top = ", ".join([f"{self._name(token)}{logprob!r}}}" for token, logprob in score.top])
        end = json.dumps(score.step > 0 and score.token in self._ends)
        own = "null" if score.logprob is None else repr(score.logprob)
        return (
            f'{self._name(score.token)}{own}, "step": {score.step}, "end": {end}, "top": [{top}]}}'
        )

    def _name(self, token: int) -> str:
        """Return the beginning of a token's JSON, up to its log-probability."""
        if token not in self._named:
            text, raw = self._spell(token), ""
            if REPLACEMENT in text and self._tokenizer:  # perhaps a part of a character
                raw = f'"bytes": {list(self._tokenizer.token_bytes(token))}, '
            elif not self._text([token]):  # such as a special token
                raw = '"hidden": true, '
            text = json.dumps(text, ensure_ascii=False)
            self._named[token] = f'{{"token_id": {token}, "text": {text}, {raw}"logprob": '
        return self._named[token]
