"""A bundle's engines on a fake TensorRT, with the profiles of a real build."""

from __future__ import annotations

import platform
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from canvasrt.build import profile_ranges
from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.pass_shapes import plan_passes
from canvasrt.runtime.backends.tensorrt import TensorRTBackend
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.open import open_model
from tests.helpers.fake_tensorrt import FakeCudaDevice, engine_file, fake_tensorrt

if TYPE_CHECKING:
    from tests.helpers.reference import Pair

VERSION, CONTEXT, BATCH = "1.7.1.116", 2048, 3
RTX = {
    "name": "rtx-5090",
    "backend": "tensorrt-rtx",
    "builder_version": VERSION,
    "compute_capability": "12.0",
    "built_on": platform.machine(),
}


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make widths small enough for the tiny model's short context."""
    monkeypatch.setattr("canvasrt.pass_shapes.FIRST_WIDTH", 128)


@pytest.fixture
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make capacities so small that the tiny model's canvases overflow."""
    monkeypatch.setattr(
        "canvasrt.expert_slots.usual_capacity", lambda model, tokens: max(4, tokens // 4)
    )


@pytest.fixture
def folder(tiny: Pair, tmp_path: Path) -> Path:
    """A bundle of fake engines with the profiles of a real build."""
    return write_engines(load_bundle(tiny.graphs, check=False), tmp_path)


def write_engines(
    graphs: Bundle,
    out: Path,
    target: Mapping[str, str] = RTX,
    seen_as: Path | None = None,
    max_batch: int = BATCH,
    planned: bool = False,
    **entry_fields: Any,
) -> Path:
    """Write a bundle of fake engines for fp32 graphs. `entry_fields` change the segment entries from which profiles are
    computed. The engines find their graphs at `seen_as`. Unless `planned` is set, the manifest has no pass plan, as in
    earlier versions, so the plan follows from the options."""
    manifest = graphs.manifest
    entries, passes = [], plan_passes(manifest.model, CONTEXT, max_batch)
    out.mkdir(exist_ok=True)
    for entry in manifest.segments:
        made = profile_ranges.to_json(
            profile_ranges.profiles({**entry, **entry_fields}, manifest.model, passes)
        )
        file = f"{entry['name']}.engine"
        (out / file).write_bytes(engine_file((seen_as or graphs.path) / entry["file"], made))
        entries.append({**entry, "file": file, "profiles": made})
    embedding = manifest.embedding
    for name in (embedding["file"], embedding["host_head"]["file"], *(manifest.tokenizer or ())):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(graphs.file(name), out / name)
    write_manifest(
        out,
        kind="engines",
        made_from={"source": manifest.made_from},
        options={**manifest.options, "max_context": CONTEXT, "max_batch": max_batch},
        model=manifest.model,
        sampler=manifest.sampler,
        segments=entries,
        embedding=embedding,
        tokenizer=manifest.tokenizer,
        target={**target, "built_on": platform.machine()},
        passes=passes.to_json() if planned else None,
    )
    return out


class Server:
    """A bundle's engines on a fake TensorRT, opened as a server opens them."""

    def __init__(
        self,
        folder: Path,
        rtx: bool = True,
        apart: bool = True,
        compiled: Path | Callable[[str], Path] | None = None,
        **options: Any,
    ) -> None:
        """`compiled`: the file for compiled kernels, or a function that returns it for the GPU's name."""
        self.device = FakeCudaDevice()
        by_name = (lambda name: compiled) if isinstance(compiled, Path) else compiled
        options = {"compiled": by_name} | options
        module = fake_tensorrt(VERSION, rtx, self.device)
        backend: Any = TensorRTBackend(RTX, apart, module, self.device, **options)  # type: ignore[arg-type]
        model = open_model(folder, check=False, backend=backend)
        assert isinstance(model, DeviceModel)
        self.model = model
        self.backend = backend

    def compiled(self) -> Counter[str]:
        """Return the number of newly compiled shapes by engine."""
        return Counter(engine for what, engine in self.device.stalls if what == "compile")
