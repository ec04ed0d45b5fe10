"""`canvasrt export`: a checkpoint to a graph bundle."""

from typing import Any

from canvasrt.cli import options
from canvasrt.cli.output import emit, progress, size


def export(
    checkpoint: options.Checkpoint, out: options.Out, as_json: options.AsJson = False
) -> None:
    """Turn a checkpoint into ONNX graphs."""
    from canvasrt import checkpoints
    from canvasrt.extras import require
    from canvasrt.staging import check_output

    check_output(out)
    folder = checkpoints.resolve(checkpoint)
    require("torch", "export")
    require("onnx", "export")
    from canvasrt.export.graphs import export as export_graphs

    with progress() as report:
        bundle = export_graphs(
            folder, out, progress=lambda done, total: report("exporting graphs", done, total)
        )
    manifest = bundle.manifest
    data: dict[str, Any] = {
        "bundle": str(bundle.path),
        "kind": manifest.kind,
        "digest": manifest.digest,
        "bytes": manifest.total_bytes,
        "segments": [segment["name"] for segment in manifest.segments],
    }

    def render(console: Any) -> None:
        console.print(
            f"{bundle.path}: {len(manifest.segments)} graphs, {size(manifest.total_bytes)}"
        )

    emit(data, as_json, render)
