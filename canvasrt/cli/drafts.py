"""Shows a canvas while it is denoised, for `canvasrt generate --drafts`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from canvasrt.runtime.request import Block, Draft, Settled
    from canvasrt.runtime.tokenizer import Tokenizer


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
            text = self._whole(tokens)
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

    def _whole(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return ",".join(map(str, tokens))
        return self._tokenizer.decode(tokens)


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
