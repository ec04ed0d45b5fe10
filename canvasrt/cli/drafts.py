"""How `canvasrt generate --drafts` shows a canvas while it is denoised."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from canvasrt.cli.output import console

if TYPE_CHECKING:
    from rich.live import Live

    from canvasrt.runtime.request import Block, Draft
    from canvasrt.runtime.tokenizer import Tokenizer


class DraftView:
    """Drafts on stdout: redrawn in place on a terminal, otherwise a line each."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._eos = eos_token_ids
        self._live: Live | None = None
        self._console = console() if sys.stdout.isatty() else None

    def draft(self, event: Draft) -> None:
        """Shows one step's draft, up to its first end of sequence; unaccepted tokens are dim."""
        tokens, accepted = self._until_end(event)
        if self._console is None:
            text = self._whole(tokens)
            print(f"block {event.block} step {event.step}: {text!r}", flush=True)
            return
        from rich.live import Live
        from rich.text import Text

        spelt = zip(map(self._spell, tokens), accepted, strict=True)
        drawn = Text.assemble(*((piece, "" if kept else "dim") for piece, kept in spelt))
        drawn.append(f"\n  block {event.block}, step {event.step}", "cyan")
        if self._live is None:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(drawn, refresh=True)

    def block(self, event: Block, piece: str) -> None:
        """Replaces the draft by the finished block's text."""
        if self._console is None:
            print(f"block {event.block} final after {event.steps} steps: {piece!r}", flush=True)
            return
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._console.print(piece, end="\n" if event.finish else "", markup=False)

    def _until_end(self, event: Draft) -> tuple[list[int], list[bool]]:
        tokens = event.tokens.tolist()
        end = next((i for i, token in enumerate(tokens) if token in self._eos), len(tokens))
        return tokens[:end], event.accepted[:end].tolist()

    def _spell(self, token: int) -> str:
        return f"{token} " if self._tokenizer is None else self._tokenizer.decode([token])

    def _whole(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return ",".join(map(str, tokens))
        return self._tokenizer.decode(tokens)
