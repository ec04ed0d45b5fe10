"""`canvasrt export`: exports a checkpoint to ONNX graphs."""

from typing import Any

from canvasrt.cli import options
from canvasrt.console import emit, progress, size
from canvasrt.formats import PLAIN


def export(
    checkpoint: options.Checkpoint,
    out: options.Out,
    precision: options.GraphPrecision = None,
    layers_per_segment: options.LayersPerSegment = None,
    adapter: options.Adapter = None,
    calibration: options.Calibration = None,
    as_json: options.AsJson = False,
) -> None:
    """Export a checkpoint to ONNX graphs."""
    from canvasrt.checkpoints.description import describe
    from canvasrt.errors import UsageError
    from canvasrt.extras import require
    from canvasrt.staging import check_output

    if precision not in (None, *PLAIN):
        raise UsageError(
            f"cannot export graphs in {precision!r}", f"give one of {', '.join(PLAIN)}"
        )
    adapters = options.adapters(adapter)
    check_output(out)
    found = describe(checkpoint)
    require("torch", "export")
    require("onnx", "export")
    from canvasrt.defaults import LAYERS_PER_SEGMENT
    from canvasrt.export.graphs import export_graphs

    with progress():
        bundle = export_graphs(
            found,
            out,
            layers_per_segment=layers_per_segment or LAYERS_PER_SEGMENT,
            precision=precision,
            adapters=adapters,
            calibration=calibration,
        )
    manifest = bundle.manifest
    data: dict[str, Any] = {
        "bundle": str(bundle.path),
        "kind": manifest.kind,
        "digest": manifest.digest,
        "bytes": manifest.total_bytes,
        "segments": [segment["name"] for segment in manifest.segments],
    }
    said = f"{bundle.path}: {len(manifest.segments)} graphs, {size(manifest.total_bytes)}"
    emit(data, lambda console: console.print(said))
