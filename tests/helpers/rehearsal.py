"""A machine with a fake GPU, for real processes: fake engines, fakes of NVIDIA's modules, and a fake nvidia-smi.

Everything else is real: the supervisor, Triton, the model's process, the cache, and `CudaDevice`.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from canvasrt.bundle import Bundle
from canvasrt.containers.package.package import package
from canvasrt.runtime.backends.compiled_kernels import PARTIAL
from tests.helpers.faulty import write_model
from tests.helpers.gpu_server import write_engines

HELPERS = Path(__file__).parent
BATCH = 2
# The name of NVIDIA's module, its version, the target, its capability, and the GPU's line in nvidia-smi.
RTX = ("tensorrt_rtx", "1.7.1.116", "rtx-5090", "12.0", "NVIDIA GeForce RTX 5090, 32607")
H100 = ("tensorrt", "11.1.0.106", "h100", "9.0", "NVIDIA H100 80GB HBM3, 81559")
_MODULE = '''"""Replaces the real module."""
import sys

from tests.helpers import fake_gpu, fake_tensorrt

sys.modules[__name__] = {made}
'''
# The path is set here, since Triton's Python does not read PYTHONPATH.
_MODEL = """
import sys

sys.path.insert(0, {folder!r})

from canvasrt.containers.triton.backend import StreamModel as TritonPythonModel
"""


@dataclass(frozen=True)
class Rehearsal:
    """The machine. `folder` contains modules and tools; processes that use it see it as `seen_as`."""

    folder: Path
    package: Path
    seen_as: Path
    gpu: str

    @property
    def engines(self) -> Path:
        return self.folder / "engines"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process sees the fake GPU. In addition, `PATH` must begin with the folder's
        `bin`."""
        return {
            "PYTHONPATH": str(self.seen_as),
            "REHEARSAL": str(self.seen_as / "state"),
            "REHEARSAL_GPU": self.gpu,
        }

    def inject(self, fault: str) -> None:
        """Set the fault that `fake_gpu.fault` returns. An empty text ends the fault."""
        fresh = self.folder / "state" / "fresh"
        fresh.write_text(fault)
        fresh.replace(fresh.with_name("fault"))

    def events(self) -> Counter[str]:
        """Return the number of events by kind: compile, context, capture."""
        file = self.folder / "state" / "events"
        lines = file.read_text().splitlines() if file.exists() else []
        return Counter(line.split()[0] for line in lines)

    def taken(self) -> list[int]:
        """Return how many bytes of GPU memory were in use after each new context."""
        lines = (self.folder / "state" / "events").read_text().splitlines()
        left = [int(line.split()[2]) for line in lines if line.startswith("context")]
        return [(1 << 32) - each for each in left]

    def forget(self) -> None:
        """Delete all recorded events."""
        (self.folder / "state" / "events").unlink(missing_ok=True)


def kernels_in(cache: Path) -> Path:
    """Return the only complete file of compiled kernels. A killed process may also have left a partial file."""
    (whole,) = (each for each in (cache / "compiled").iterdir() if PARTIAL not in each.name)
    return whole


def rehearsal(
    graphs: Bundle, folder: Path, machine: tuple[str, ...] = RTX, seen_as: Path | None = None
) -> Rehearsal:
    """Write a package of fake engines for fp32 graphs to a folder, and the machine that can run it."""
    module, version, target, capability, name = machine
    seen_as = seen_as or folder
    (folder / "state").mkdir(parents=True)
    (folder / "state").chmod(0o777)
    _write_modules(folder, module, version)
    smi = folder / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\necho '{name}, {capability}, 580.95, GPU-0'\n")
    smi.chmod(0o755)
    shutil.copytree(graphs.path, folder / "graphs")
    made_for = {
        "name": target,
        "backend": module.replace("_", "-"),
        "builder_version": version,
        "compute_capability": capability,
    }
    seen = seen_as / "graphs"
    engines = write_engines(graphs, folder / "engines", made_for, seen, BATCH, planned=True)
    package(engines, folder / "package")
    write_model(folder / "package", _MODEL.format(folder=str(seen_as)))
    return Rehearsal(folder, folder / "package", seen_as, target)


def _write_modules(folder: Path, module: str, version: str) -> None:
    helpers = folder / "tests" / "helpers"
    helpers.mkdir(parents=True)
    for file in ("fake_engine.py", "fake_gpu.py", "fake_tensorrt.py"):
        shutil.copy(HELPERS / file, helpers)
    made = f"fake_tensorrt.fake_tensorrt({version!r}, {module == 'tensorrt_rtx'}, fake_gpu.GPU)"
    (folder / f"{module}.py").write_text(_MODULE.format(made=made))
    bindings = folder / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    (bindings / "__init__.py").touch()
    (bindings / "runtime.py").write_text(_MODULE.format(made="fake_gpu.Runtime()"))
    (bindings / "driver.py").write_text(_MODULE.format(made="object()"))  # for canvasrt's kernels
