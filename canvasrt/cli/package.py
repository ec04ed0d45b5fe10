"""`canvasrt package`: engines to a folder that `docker build` takes."""

from pathlib import Path
from typing import Annotated

import typer

from canvasrt.cli.options import AsJson, EnginesPath, Out


def package(
    bundle: EnginesPath,
    out: Out,
    format: Annotated[
        str, typer.Option("--format", metavar="NAME", help="context: a folder for docker build.")
    ] = "context",
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
    """Write engines, a Triton model repository and a Dockerfile as one folder."""
    from rich.console import Console

    from canvasrt.cli.output import emit, progress, size
    from canvasrt.containers.package import REPOSITORY
    from canvasrt.containers.package import package as write_package

    with progress() as show:
        made = write_package(
            bundle,
            out,
            format=format,
            max_batch=max_batch,
            progress=lambda done, total: show("checking the engines", done, total),
        )
    data = {
        "path": str(Path(out).resolve()),
        "digest": made.manifest.digest,
        "bytes": made.manifest.total_bytes,
        "model_repository": str(Path(out).resolve() / REPOSITORY),
    }

    def render(console: Console) -> None:
        console.print(f"{out}: {size(made.manifest.total_bytes)}", markup=False)
        console.print(f"  canvasrt serve {out}", markup=False)
        console.print(f"  docker build -t canvasrt {out}", markup=False)

    emit(data, as_json, render)
