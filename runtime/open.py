"""Open a bundle: choose a backend and load the engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from canvasrt.bundle import Bundle, Manifest, load_bundle
from canvasrt.cache import cache_folder, key_of
from canvasrt.errors import CanvasError, UsageError
from canvasrt.machine import memory_bytes
from canvasrt.runtime.bundle_facts import limited_context, pass_work
from canvasrt.runtime.bundle_facts import max_context as supported_context
from canvasrt.runtime.engine import Backend, DeviceBackend
from canvasrt.runtime.host_model import HostModel
from canvasrt.runtime.model import Model

DEVICES = ("cpu", "cuda")


def open_model(
    path: str | Path,
    threads: int | None = None,
    check: bool = True,
    backend: Backend | DeviceBackend | None = None,
    device: str | None = None,
    share_passes: bool = False,
    max_context: int | None = None,
    gpu: int = 0,
) -> Model:
    """Load a bundle of graphs or engines.

    - threads: CPU threads; None uses every core.
    - check: verify the files' hashes first.
    - backend: replaces the backend that `device` selects.
    - device: `cpu` or `cuda`; None selects the device that the bundle was built for.
    - share_passes: let requests share passes on a GPU. Denoising passes then have the shape of a full batch.
    - max_context: maximum number of tokens of a request: prompt plus answer; None means the bundle's limit.
    - gpu: the index of the GPU among the GPUs that CUDA_VISIBLE_DEVICES lists.

    Raises CanvasError for a bundle that is damaged or that this machine cannot run.
    """
    bundle = load_bundle(path, kind=("graphs", "engines"), check=check)
    limit = limited_context(supported_context(bundle.manifest), max_context)
    if backend is None:
        backend = choose_backend(bundle.manifest, device, threads, share_passes, gpu)
        if not isinstance(backend, DeviceBackend):
            _check_memory(bundle)
    if isinstance(backend, DeviceBackend):
        from canvasrt.runtime.gpu.device_model import DeviceModel

        return DeviceModel(bundle, backend, limit)
    return HostModel(bundle, backend, limit)


def _check_memory(bundle: Bundle) -> None:
    """Raise CanvasError if the weights exceed this machine's memory. The weights must fit, because ONNX Runtime
    converts them to its own format."""
    names = [Path(entry["file"]).with_suffix(".bin").name for entry in bundle.manifest.segments]
    files = [bundle.manifest.files.get(name, {}) for name in names if name != "vision.bin"]
    need, have = sum(each.get("bytes", 0) for each in files), memory_bytes()
    if need > have:
        raise CanvasError(
            f"the weights take {need / 1e9:.1f} GB of memory; this machine has {have / 1e9:.1f} GB",
            "build them smaller with `canvasrt build … --target cpu --precision int4`, or use a larger machine",
        )


def check_device(device: str | None) -> None:
    """Raise UsageError for a device that is neither None nor in DEVICES."""
    if device not in (None, *DEVICES):
        raise UsageError(f"unknown device {device!r}", f"give one of {', '.join(DEVICES)}")


def choose_backend(
    manifest: Manifest,
    device: str | None = None,
    threads: int | None = None,
    share_passes: bool = False,
    gpu: int = 0,
) -> Backend | DeviceBackend:
    """Return the backend for a bundle. Raises CanvasError if this machine cannot run the bundle.

    device: None selects the device that the bundle was built for, or the CPU for plain graphs. share_passes: let
    requests share passes on a GPU; ignored on a CPU, where sharing gains nothing.
    """
    check_device(device)
    target = manifest.target or {}
    builder = target.get("backend", "onnxruntime")
    if builder in ("tensorrt-rtx", "tensorrt"):
        if device == "cpu":
            raise CanvasError(
                f"the bundle holds engines for {target.get('name')}, which a CPU cannot run",
                "give graphs, or build for the target `cpu`",
            )
        from canvasrt.runtime.backends.tensorrt import TensorRTBackend

        compiled = partial(_compiled_kernels, manifest)
        return TensorRTBackend(target, not share_passes, compiled=compiled, gpu=gpu)
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
                "the bundle was built for the CPU, and its experts have a form that GPUs do not support",
                "give the graphs that `canvasrt export` wrote, or build for the GPU",
            )
        from canvasrt.runtime.backends.onnxruntime_cuda import OrtCudaBackend

        return OrtCudaBackend(rows_apart=not share_passes)
    from canvasrt.runtime.backends.onnxruntime import OrtBackend

    return OrtBackend(threads, pass_work(manifest.model))


def _compiled_kernels(manifest: Manifest, gpu: str) -> Path:
    """Return the path of the cached kernels that TensorRT-RTX compiles for a bundle's engines. `gpu` is the GPU's
    name."""
    engines = {
        entry["file"]: manifest.files[entry["file"]]["sha256"] for entry in manifest.segments
    }
    key = key_of({"engines": engines, "target": manifest.target, "gpu": gpu})
    return cache_folder() / "compiled" / key


def _check_graphs(precision: str, device: str | None) -> None:
    """Raise CanvasError for graphs of a precision that ONNX Runtime cannot run on this device."""
    if precision not in ("fp32", "bf16"):
        raise CanvasError(
            f"the graphs are quantized to {precision} and only run as engines",
            "build them: `canvasrt build GRAPHS --target cpu`, or with a GPU as the target",
        )
    if precision == "bf16" and device != "cuda":
        raise CanvasError(
            "the graphs are in bf16, which a CPU cannot run",
            "export the checkpoint with --precision fp32, or give --device cuda on a machine with a GPU",
        )
