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
            help="Also compare its denoising steps with transformers on this checkpoint.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Check every file of a bundle against its hash, and with --reference what it computes."""
    from canvasrt.bundle import load_bundle
    from canvasrt.checkpoints import resolve
    from canvasrt.errors import CanvasError

    checkpoint = None if reference is None else resolve(reference)
    fidelity = None
    with progress() as report:
        found = load_bundle(
            bundle, progress=lambda done, total: report("checking files", done, total)
        )
        if checkpoint is not None:
            from canvasrt.fidelity import measure

            fidelity = measure(found.path, checkpoint, report)
    manifest, unlisted = found.manifest, found.unlisted()
    data: dict[str, Any] = {
        "bundle": str(bundle),
        "ok": fidelity is None or fidelity.ok,
        "kind": manifest.kind,
        "digest": manifest.digest,
        "files": len(manifest.files),
        "bytes": manifest.total_bytes,
        "unlisted": unlisted,
    }
    if fidelity is not None:
        data["fidelity"] = fidelity.to_json()

    def render(console: Any) -> None:
        console.print(
            f"{bundle}: {len(manifest.files)} files, {size(manifest.total_bytes)}, all as the manifest says"
        )
        if unlisted:
            console.print(f"not in the manifest, and read by nothing: {', '.join(unlisted)}")

        if fidelity is not None:
            console.print(
                f"against {reference}: the same best token at {fidelity.argmax_agreement:.2%} of"
                f" {fidelity.positions:,} positions; entropy off by {fidelity.entropy_error_mean:.1e}"
                f" nats in the mean, {fidelity.entropy_error_max:.1e} at most"
            )

    emit(data, as_json, render)
    if fidelity is not None and not fidelity.ok:
        raise CanvasError(
            f"{bundle} does not compute what {reference} does",
            "give the checkpoint that it was made from, or build it again",
        )
