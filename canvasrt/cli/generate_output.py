"""The output of `canvasrt generate`: answers, streams of text or JSON, and the canvas while it is denoised."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from canvasrt.console import emit, emit_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from canvasrt.runtime.request import Block, Draft, Event, Request, Result, Settled
    from canvasrt.runtime.tokenizer import StreamDecoder, Tokenizer


def show_answers(answers: Sequence[dict[str, Any]]) -> None:
    """Print one answer, or several answers, each under a heading with its seed."""

    def render(_: Any) -> None:
        for index, answer in enumerate(answers):
            if len(answers) > 1:
                print(f"{chr(10) if index else ''}--- seed {answer['seed']}")
            print(_text_or_ids(answer["text"], answer["token_ids"]))

    emit(answers[0] if len(answers) == 1 else answers, render)


def answer_of(result: Result, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return an answer in the form that `--json` prints. Its text is None if there is no tokenizer."""
    words, scores = _without_end(result.token_ids, result.finish_reason), result.block_scores
    return {
        "text": None if tokenizer is None else tokenizer.decode(words),
        "token_ids": result.token_ids,
        "prompt_token_ids": result.prompt_token_ids,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "steps": result.steps,
        **({"logprobs": [asdict(each) for each in result.logprobs]} if result.logprobs else {}),
        **({"block_scores": list(map(asdict, scores))} if scores else {}),
        "seconds": {
            "first_block": result.timings.first_block,
            "total": result.timings.total,
        },
    }


def _without_end(ids: list[int], finish: str | None) -> list[int]:
    """Return an answer's token ids without the end-of-sequence token, if that token ended the answer."""
    return ids[:-1] if finish == "stop" else ids


def _text_or_ids(text: str | None, ids: list[int]) -> str:
    """Return the text; if it is None, because there is no tokenizer, return the token ids as text."""
    return ",".join(map(str, ids)) if text is None else text


def stream_json(
    events: Iterator[Event], request: Request, tokenizer: Tokenizer | None, drafts: bool
) -> None:
    """Print one line of JSON per event. The last line also has the fields that `--json` prints without `--stream`."""
    from canvasrt.runtime.request import Block, Draft, Settled

    def line(event: Any, words: list[int], /, **more: Any) -> dict[str, Any]:
        text = None if tokenizer is None else tokenizer.decode(words)
        return {**more, "text": text, "token_ids": list(map(int, event.tokens))}

    for event in events:
        if isinstance(event, Draft):
            if drafts:
                at = {"event": "draft", "block": event.block, "step": event.step}
                emit_line(line(event, event.tokens.tolist(), **at))
        elif isinstance(event, Settled):
            at = {"event": "settled", "block": event.block, "step": event.step}
            emit_line(line(event, event.tokens, **at))
        elif isinstance(event, Block):
            at = {"event": "block", "block": event.block, "steps": event.steps}
            emit_line(line(event, _without_end(event.tokens, event.finish), **at))
        else:
            emit_line({"event": "finished", **answer_of(event.result, tokenizer)})


def stream_text(
    events: Iterator[Event], request: Request, tokenizer: Tokenizer | None, drafts: bool
) -> None:
    """Print text as soon as it is final. If `drafts` is true, also show the canvas after every step."""
    from canvasrt.runtime.request import Block, Draft, Settled
    from canvasrt.runtime.tokenizer import StreamDecoder

    decoder = None if tokenizer is None else StreamDecoder(tokenizer)
    view = DraftView(tokenizer, request.params.eos_token_ids) if drafts else None
    try:
        for event in events:
            if isinstance(event, Draft) and view is not None:
                view.draft(event)
            elif isinstance(event, Settled | Block):
                piece = _piece(event, decoder)
                finish = event.finish if isinstance(event, Block) else None
                if view is None:
                    print(piece, end="\n" if finish else "", flush=True)
                elif isinstance(event, Settled):
                    view.settled(event, piece)
                else:
                    view.block(event, piece)
    finally:
        if view is not None:
            view.close()


def _piece(event: Settled | Block, decoder: StreamDecoder | None) -> str:
    """Return the text that an event adds to the answer."""
    from canvasrt.runtime.request import Block

    finish, sent = (event.finish, event.settled) if isinstance(event, Block) else (None, 0)
    tokens = event.tokens[sent:]
    if decoder is None:
        return _text_or_ids(None, tokens) + ("" if finish else ",")
    return decoder.put(_without_end(tokens, finish), final=finish is not None)


class DraftView:
    """Prints drafts: redrawn in place on a terminal, otherwise one per line."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._eos = eos_token_ids
        self._done = ""  # text of finished blocks
        self._begun = ""  # settled text after the finished blocks
        self._live = live_region() if sys.stdout.isatty() else None

    def draft(self, event: Draft) -> None:
        """Show one step's draft, up to the first end-of-sequence token. Tokens that were not accepted are dim."""
        tokens, accepted = self._until_end(event)
        if self._live is None:
            text = _text_or_ids(self._tokenizer.decode(tokens) if self._tokenizer else None, tokens)
            print(f"block {event.block} step {event.step}: {text!r}", flush=True)
            return
        from rich.text import Text

        spelt = zip(map(self._spell, tokens), accepted, strict=True)
        drawn = Text(self._done)
        for piece, kept in spelt:
            drawn.append(piece, "" if kept else "dim")
        drawn.append(f"\n  block {event.block}, step {event.step}", "cyan")
        self._live.start()
        self._live.update(tail(drawn, self._live.console), refresh=True)

    def settled(self, event: Settled, piece: str) -> None:
        """Add final text. On a terminal, nothing is printed, because drafts already show this text."""
        self._begun += piece
        if self._live is None:
            print(f"block {event.block} settled at step {event.step}: {piece!r}", flush=True)

    def block(self, event: Block, piece: str) -> None:
        """Show a finished block. On a terminal, it replaces the draft; after the last block, the answer is printed."""
        if self._live is None:
            print(f"block {event.block} final after {event.steps} steps: {piece!r}", flush=True)
            return
        self._done, self._begun = self._done + self._begun + piece, ""
        if event.finish:
            self._live.stop()
            print(self._done, flush=True)

    def close(self) -> None:
        """Restore the terminal."""
        if self._live is not None:
            self._live.stop()

    def _until_end(self, event: Draft) -> tuple[list[int], list[bool]]:
        tokens = event.tokens.tolist()
        end = next((i for i, token in enumerate(tokens) if token in self._eos), len(tokens))
        return tokens[:end], event.accepted[:end].tolist()

    def _spell(self, token: int) -> str:
        return f"{token} " if self._tokenizer is None else self._tokenizer.decode([token])


def live_region() -> Live:
    """Return a region of the terminal that can be redrawn and is cleared at the end."""
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(highlight=False, emoji=False), transient=True, auto_refresh=False)


def tail(drawn: Text, console: Console) -> Text:
    """Return the last lines of a text, as many as the terminal shows at once.

    One row stays free for the cursor, which moves to the row below the region when the region is closed.
    """
    from rich.text import Text

    lines = drawn.wrap(console, console.width)
    return Text("\n").join(lines[-max(1, console.height - 1) :])
