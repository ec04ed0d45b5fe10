"""A build that is interrupted, killed or out of disk space leaves no process and no unfinished file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from canvasrt.build.compile import Job, compile_graph
from canvasrt.cache import cache_folder
from canvasrt.errors import CanvasError
from canvasrt.pass_shapes import Range
from tests.helpers import library
from tests.helpers.quantized import small_graphs
from tests.helpers.serving import eventually

pytest.importorskip("tensorrt_rtx", reason="needs canvasrt[rtx]")


def builders(cache: Path) -> list[int]:
    """Return the running builder processes of a build with this cache."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_text(errors="replace")
        except OSError:
            continue
        if "canvasrt.build.compile" in line and str(cache) in line:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_builder_outlives_its_build(number: signal.Signals, tmp_path: Path) -> None:
    library.graphs("demo", "bf16")
    cache = library.empty_cache(tmp_path / "cache")
    # The graphs come from the tests' library, so only engines are built.
    (cache / "graphs").symlink_to(cache_folder() / "graphs")
    arguments = ["build", "demo", "-t", "dgx-spark", "-p", "bf16", "-o", str(tmp_path / "out")]
    build = subprocess.Popen(
        [sys.executable, "-m", "canvasrt", *arguments],
        env={**os.environ, "CANVASRT_CACHE": str(cache)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert eventually(lambda: bool(builders(tmp_path)) or build.poll() is not None, 500)
        assert build.poll() is None, build.stderr and build.stderr.read()
        build.send_signal(number)
        assert build.wait(60) != 0
        assert eventually(lambda: not builders(tmp_path), 60)
    finally:
        build.kill()
        build.wait()
        if build.stderr:
            build.stderr.close()
    if number != signal.SIGKILL:  # after SIGKILL, the next build removes unfinished files
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


def test_a_disk_that_fills_up_under_an_engine_is_an_error(tmp_path: Path) -> None:
    """TensorRT's bindings ignore exceptions of the stream writer, so the builder must keep the error."""
    graph = small_graphs().file("head.onnx")
    sizes = {"all": {"batch": Range(1, 1, 1), "length": Range(256, 256, 256)}}
    job = Job("tensorrt_rtx", graph, tmp_path / "head.engine", ((12, 0),), sizes)
    job.engine.symlink_to("/dev/full")
    with pytest.raises(CanvasError, match=r"failed to build an engine: .*No space left on device"):
        compile_graph(job)
    job.engine.unlink()
    job.kernels.symlink_to("/dev/full")
    compile_graph(job)
    assert job.engine.is_file()
    assert not job.kernels.is_symlink()  # no truncated list of kernels is left
