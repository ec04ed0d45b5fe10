"""Bundles with experts over sorted rows, for the fake TensorRT and Triton's interpreter."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from canvasrt.build import compile
from canvasrt.build.compile import Job
from canvasrt.build.options import BuildOptions
from canvasrt.bundle import Bundle
from canvasrt.pipeline import build_bundle
from canvasrt.runtime.backends.tensorrt import TensorRTBackend
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.open import open_model
from canvasrt.sorted_rows import ahead
from tests.helpers.fake_tensorrt import ACTIVATIONS, engine_file, fake_tensorrt
from tests.helpers.interpreted import SortingDevice, named_kernel

TARGET = "rtx-pro-6000"


def build_sorted(graphs: Path, out: Path, **options: Any) -> Bundle:
    """Build a bundle with `--experts sorted`. Its engine files name graphs, and its kernel files name kernels."""
    kept = out.with_name(f"{out.name}-graphs")
    kept.mkdir()

    def name_graph(job: Job, children: Any = None) -> int:
        # The graphs of pieces must be copied, since the build removes them at its end.
        data = job.graph.with_suffix(".bin")
        names = {
            entry.value
            for tensor in onnx.load(job.graph, load_external_data=False).graph.initializer
            for entry in tensor.external_data
            if entry.key == "location"
        }
        for name in {job.graph.name, *names, *([data.name] if data.exists() else [])}:
            if not (kept / name).exists():
                shutil.copy(job.graph.with_name(name), kept)
        profiles = [
            {dimension: size.to_json() for dimension, size in sizes.items()}
            for sizes in job.profiles.values()
        ]
        job.engine.write_bytes(engine_file(kept / job.graph.name, profiles))
        return ACTIVATIONS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "compile_graph", name_graph)
        patch.setattr(ahead, "compile_kernel", named_kernel)
        # The check would refuse fp32 graphs. Real engines compute in bf16, but ONNX Runtime cannot on a CPU.
        patch.setattr("canvasrt.build.checks.check_source", lambda *_: None)
        patch.setenv("CANVASRT_CACHE", str(out.with_name(f"{out.name}-cache")))
        made = BuildOptions(
            **{"precision": "bf16", "experts": "sorted", "max_context": 2048} | options
        )
        return build_bundle(graphs, TARGET, out, made)


def open_sorted(
    bundle: Bundle,
    share: bool = False,
    rtx: bool = True,
    then: Callable[[SortingDevice], object] = lambda device: None,
) -> tuple[DeviceModel, SortingDevice]:
    """Open such a bundle on a fake device. `then` is called with the device before the engines are opened."""
    backend, device = sorted_backend(bundle, share, rtx)
    then(device)
    model = open_model(bundle.path, backend=backend)
    assert isinstance(model, DeviceModel)
    device.kernels_run = 0  # not counting the checks
    return model, device


def sorted_backend(
    bundle: Bundle, share: bool = False, rtx: bool = True
) -> tuple[TensorRTBackend, SortingDevice]:
    """Return the backend for such a bundle, and its fake device."""
    device, target = SortingDevice(), bundle.manifest.target
    assert target is not None
    assert target["built_on"] == platform.machine()
    module = fake_tensorrt(target["builder_version"], rtx, device)
    return TensorRTBackend(target, not share, module, device), device  # type: ignore[arg-type]
