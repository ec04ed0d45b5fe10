"""`canvasrt demo`: every step on this machine, from the demo checkpoint to served answers."""

from pathlib import Path
from typing import Annotated

import typer

from canvasrt.cli.options import AsJson


def demo(
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="DIR",
            show_default=False,
            help="Keep the engines and the package in this folder.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build, package and serve the demo checkpoint, ask it questions, and stop."""
    from canvasrt.cli.walkthrough import run_walkthrough

    run_walkthrough(keep, as_json)
