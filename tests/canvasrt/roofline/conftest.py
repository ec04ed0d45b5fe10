"""Engines of the released widths, of which the tests' library keeps only manifests and kernel lists."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.shape import few_experts
from canvasrt.bundle import MANIFEST, Bundle, load_bundle
from canvasrt.defaults import SLOTTED
from canvasrt.roofline.store import KERNELS_SUFFIX
from tests.helpers import library

MAX_CONTEXT, MAX_BATCH = 4096, 4
SOURCES = ("bench.shape", "bench.synthetic", "canvasrt", "canvasrt.export")

Released = Callable[..., Bundle]


@pytest.fixture(scope="session")
def released() -> Released:
    """Return a function that returns engines of two sliding layers and a full one. They are built once per recipe,
    target and form of the experts."""
    pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")

    def engines(recipe: str, target: str, experts: str = SLOTTED) -> Bundle:
        code = (*SOURCES, "canvasrt.build")
        kept = library.kept(_build_released, recipe, target, experts, code=code)
        return load_bundle(kept, check=False)

    return engines


def _released_graphs(out: Path, recipe: str) -> None:
    if recipe != "bf16":  # quantized from the bf16 graphs
        plain = library.kept(_released_graphs, "bf16", code=SOURCES)
        out.mkdir()
        (out / "widths-graphs").symlink_to(plain / "widths-graphs")
    few_experts(recipe, out)
    shutil.rmtree(out / "widths-checkpoint", ignore_errors=True)


def _build_released(out: Path, recipe: str, target: str, experts: str) -> None:
    """Build engines and keep the files that tests read. The large engine files are replaced by sparse files of the same
    size."""
    name = "widths-graphs" if recipe == "bf16" else f"widths-graphs-{recipe}"
    graphs = library.kept(_released_graphs, recipe, code=SOURCES) / name
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "engines"
        # In a child process, since in this one, Triton (the language) may be set to interpret instead of compiling.
        line = ["build", str(graphs), "-t", target, "-o", str(made), "--experts", experts]
        line += ["--max-context", str(MAX_CONTEXT), "--max-batch", str(MAX_BATCH)]
        command = [sys.executable, "-m", "canvasrt", *line]
        # The usual cache would keep the engines; this one is removed.
        env = {**os.environ, "CANVASRT_CACHE": f"{folder}/cache"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for name, entry in load_bundle(made, check=False).manifest.files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(KERNELS_SUFFIX):
                shutil.copy(made / name, out / name)
            else:
                (out / name).touch()
                os.truncate(out / name, entry["bytes"])
        shutil.copy(made / MANIFEST, out)
