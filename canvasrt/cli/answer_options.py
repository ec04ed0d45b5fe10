"""Options that `generate`, `infer` and `chat` share, beside the sampler's and the prompt's."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from canvasrt.cli.options import read_option
from canvasrt.errors import UsageError

Drafts = Annotated[
    bool,
    typer.Option("--drafts", help="Print the draft of each step too; on a terminal, in place."),
]
CanvasJson = Annotated[
    str | None,
    typer.Option(
        "--canvas",
        metavar="JSON",
        show_default=False,
        help='Seed, pin or restrict the tokens at positions, as in {"pin": {"0": 17}}.',
    ),
]
AnswerTimeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", min=0, help="How long the whole answer may take."),
]


def canvas_conditions(text: str | None, infill: str | None = None) -> Any:
    """Return the conditions of --canvas. UsageError for what they are not, or with --infill."""
    if text is None:
        return None
    if infill is not None:
        raise UsageError("--infill has a canvas of its own", "leave out --canvas")

    from canvasrt.runtime.conditions import read_conditions

    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--canvas is not JSON: {error}", 'give {"pin": {"0": 17}}') from None
    return read_option(lambda: read_conditions(value))
