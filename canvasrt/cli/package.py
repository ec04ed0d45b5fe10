"""`canvasrt package`: engines to a folder for `docker build`, or to an image."""

from pathlib import Path
from typing import Annotated

import typer

from canvasrt.cli.options import AsJson


def package(
    bundles: Annotated[
        list[Path],
        typer.Argument(
            metavar="BUNDLE...",
            show_default=False,
            help="What `canvasrt build` wrote; several, for different targets, go into one package.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="OUT",
            show_default=False,
            help="The folder to write; for the format docker, a file.",
        ),
    ],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="context: a folder for docker build; oci: an OCI layout; docker: for docker load.",
        ),
    ] = "context",
    tag: Annotated[
        str, typer.Option("--tag", metavar="NAME[:TAG]", help="What the image is called.")
    ] = "canvasrt:latest",
    engines: Annotated[
        str,
        typer.Option(
            "--engines",
            metavar="copy|mount",
            help="Whether the image holds the engines, or they are mounted when it runs.",
        ),
    ] = "copy",
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="IMAGE",
            show_default=False,
            help="Built on this: a name for context; for oci and docker, a layout or archive on disk.",
        ),
    ] = None,
    wheels: Annotated[
        bool,
        typer.Option(
            "--wheels", help="Put all wheels into the folder, to build without a network."
        ),
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(
            "--python",
            metavar="VERSION",
            show_default=False,
            help="The base's Python, such as 3.12, where its name does not tell.",
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            "--max-batch",
            metavar="N",
            min=1,
            show_default=False,
            help="How many requests are denoised together; without it, the engines' limit.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write engines, a Triton model repository and an image, or all that one is built from."""
    from rich.console import Console

    from canvasrt.cli import packaging as command
    from canvasrt.console import emit, progress

    options = command.Options(
        format=format,
        tag=tag,
        engines=engines,
        base=base,
        wheels=wheels,
        python=python,
        max_batch=max_batch,
    )
    with progress() as show:
        data = command.run(bundles, out, options, show)

    def render(console: Console) -> None:
        for line in command.lines(data):
            console.print(line, markup=False)

    emit(data, as_json, render)
