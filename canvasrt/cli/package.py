"""`canvasrt package`: writes engines as a folder for `docker build`, or as an image."""

from pathlib import Path
from typing import Annotated

import typer

from canvasrt.cli.field_options import with_fields
from canvasrt.cli.options import AsJson
from canvasrt.containers.package.options import PackageOptions

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
Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="IMAGE",
        show_default=False,
        help="The base image: its name for context, or a layout or archive on disk for oci and docker.",
    ),
]
Python = Annotated[
    str | None,
    typer.Option(
        "--python",
        metavar="VERSION",
        show_default=False,
        help="Python version of the base image, such as 3.12, if its name does not say.",
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


@with_fields("options", PackageOptions)
def package(
    bundles: Bundles,
    out: Out,
    options: PackageOptions,
    format: Format = "context",
    base: Base = None,
    python: Python = None,
    sign: Sign = None,
    as_json: AsJson = False,
) -> None:
    """Package engines with a Triton model repository, as an image or a folder to build one from."""
    from rich.console import Console

    from canvasrt.cli import packaging as command
    from canvasrt.console import emit, progress

    image = command.ImageOptions(format=format, base=base, python=python, sign=sign)
    with progress() as show:
        data = command.make_package(bundles, out, options, image, show)

    def render(console: Console) -> None:
        for line in command.package_lines(data):
            console.print(line, markup=False)

    emit(data, as_json, render)
