"""Which backend runs a bundle: decided by its target, and by the device that was asked for."""

from __future__ import annotations

from canvasrt.bundle import Manifest
from canvasrt.errors import CanvasError, UsageError
from canvasrt.runtime.engine import Backend, DeviceBackend
from canvasrt.runtime.model import pass_work

DEVICES = ("cpu", "cuda")


def choose(
    manifest: Manifest,
    device: str | None = None,
    threads: int | None = None,
    share_passes: bool = False,
) -> Backend | DeviceBackend:
    """The backend for a bundle; CanvasError when this machine has not what it needs.

    device: None takes the device that the bundle was built for, and the CPU for plain graphs; share_passes:
    whether requests share passes on a GPU. (On a CPU they gain nothing by it.)
    """
    if device not in (None, *DEVICES):
        raise UsageError(f"unknown device {device!r}", f"devices are: {', '.join(DEVICES)}")
    target = manifest.target or {}
    builder = target.get("backend", "onnxruntime")
    if builder in ("tensorrt-rtx", "tensorrt"):
        if device == "cpu":
            raise CanvasError(
                f"the bundle holds engines for {target.get('name')}, which a CPU cannot run",
                "give graphs, or build it for the target `cpu`",
            )
        from canvasrt.runtime.tensorrt import TensorRTBackend

        return TensorRTBackend(target, rows_apart=not share_passes)
    if builder != "onnxruntime":
        raise CanvasError(
            f"the bundle was built for {builder}, which this version cannot run",
            "build it again with this version",
        )
    if not target:
        _check_graphs(manifest.options.get("precision", "fp32"), device)
    if device == "cuda":
        if target:
            raise CanvasError(
                "the bundle was built for the CPU: its experts have a form that suits no GPU",
                "give the graphs that `canvasrt export` wrote, or build for the GPU",
            )
        from canvasrt.runtime.onnxruntime_cuda import OrtCudaBackend

        return OrtCudaBackend(rows_apart=not share_passes)
    from canvasrt.runtime.onnxruntime import OrtBackend

    return OrtBackend(threads, pass_work(manifest.model))


def _check_graphs(precision: str, device: str | None) -> None:
    """Refuses graphs that are not run as they are: ONNX Runtime has no kernels for them."""
    if precision not in ("fp32", "bf16"):
        raise CanvasError(
            f"the graphs are quantized to {precision}, and run as engines only",
            "build them for a target: `canvasrt build GRAPHS --target cpu`, or that of a GPU",
        )
    if precision == "bf16" and device != "cuda":
        raise CanvasError(
            "the graphs are in bf16, which a CPU does not run",
            "export the checkpoint with --precision fp32, or give --device cuda where there is a GPU",
        )
