"""`canvasrt verify`: is a bundle whole, and does it say what its checkpoint says."""

from typing import Annotated, Any

import typer

from canvasrt.cli import options
from canvasrt.cli.output import emit, progress, size


def verify(
    bundle: options.BundlePath,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="CHECKPOINT",
            show_default=False,
            help="Also measure fidelity against this checkpoint.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Check every file of a bundle against its hash."""
    from canvasrt.bundle import load_bundle
    from canvasrt.errors import CanvasError

    if reference is not None:
        raise CanvasError(
            "fidelity against a checkpoint is not measured by this version yet",
            "leave --reference out to check the bundle's hashes",
        )
    with progress() as report:
        found = load_bundle(
            bundle, progress=lambda done, total: report("checking files", done, total)
        )
    manifest, unlisted = found.manifest, found.unlisted()
    data: dict[str, Any] = {
        "bundle": str(bundle),
        "ok": True,
        "kind": manifest.kind,
        "digest": manifest.digest,
        "files": len(manifest.files),
        "bytes": manifest.total_bytes,
        "unlisted": unlisted,
    }

    def render(console: Any) -> None:
        console.print(
            f"{bundle}: {len(manifest.files)} files, {size(manifest.total_bytes)}, all as the manifest says"
        )
        if unlisted:
            console.print(f"not in the manifest, and read by nothing: {', '.join(unlisted)}")

    emit(data, as_json, render)
