"""`canvasrt package`: writes engines as a folder for `docker build`, or as an image."""

from pathlib import Path
from typing import Annotated

import typer

from canvasrt.cli.options import AsJson

Bundles = Annotated[
    list[Path],
    typer.Argument(
        metavar="BUNDLE",
        show_default=False,
        help="Folders that `canvasrt build` wrote; one package can have several targets.",
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "-o",
        "--out",
        metavar="OUT",
        show_default=False,
        help="The folder to write; with --format docker, the file.",
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="NAME",
        help="context: a folder for docker build; oci: an OCI layout; docker: an archive for docker load.",
    ),
]
Tag = Annotated[str, typer.Option("--tag", metavar="NAME[:TAG]", help="The image's name.")]
Engines = Annotated[
    str,
    typer.Option(
        "--engines",
        metavar="copy|mount",
        help="Copy the engines into the image, or mount them when it runs.",
    ),
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="IMAGE",
        show_default=False,
        help="The base image: its name for context, or a layout or archive on disk for oci and docker.",
    ),
]
Wheels = Annotated[
    bool,
    typer.Option("--wheels", help="Include all wheels, to build the image without a network."),
]
Python = Annotated[
    str | None,
    typer.Option(
        "--python",
        metavar="VERSION",
        show_default=False,
        help="The base's version of Python, such as 3.12, if its name does not say.",
    ),
]
Sign = Annotated[
    Path | None,
    typer.Option(
        "--sign",
        metavar="KEY",
        show_default=False,
        help="Sign the image's provenance with this private key (PEM), for oci and docker.",
    ),
]
MaxBatch = Annotated[
    int | None,
    typer.Option(
        "--max-batch",
        metavar="N",
        min=1,
        show_default="the engines'",
        help="Maximum number of requests denoised together.",
    ),
]


def package(
    bundles: Bundles,
    out: Out,
    format: Format = "context",
    tag: Tag = "canvasrt:latest",
    engines: Engines = "copy",
    base: Base = None,
    wheels: Wheels = False,
    python: Python = None,
    max_batch: MaxBatch = None,
    sign: Sign = None,
    as_json: AsJson = False,
) -> None:
    """Package engines with a Triton model repository, as an image or a folder to build one from."""
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
        sign=sign,
    )
    with progress() as show:
        data = command.run(bundles, out, options, show)

    def render(console: Console) -> None:
        for line in command.lines(data):
            console.print(line, markup=False)

    emit(data, as_json, render)
