"""A container's first start on a GPU, simulated with real processes and a fake GPU: kernels that are compiled and kept,
and faults."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from canvasrt.bundle import Bundle, load_bundle
from canvasrt.containers.ports import bind
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers.faulty import Watch
from tests.helpers.rehearsal import H100, RTX, Rehearsal, kernels_in, rehearsal
from tests.helpers.serving import Local, eventually, needs_triton
from tests.helpers.serving_process import (
    ANY_PORTS,
    Serving,
    ask,
    call,
    command_lines,
    serving,
    started,
)

Right = Callable[[Serving], bool]
pytestmark = [needs_triton, pytest.mark.acceptance]


@pytest.fixture
def gpu(
    request: pytest.FixtureRequest,
    graphs: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Rehearsal:
    """A machine with a fake GPU: a GeForce, unless the test names another."""
    made = rehearsal(graphs, tmp_path / "machine", getattr(request, "param", RTX))
    for name, text in made.environment.items():
        monkeypatch.setenv(name, text)
    path = f"{made.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    return made


@contextlib.contextmanager
def start(gpu: Rehearsal, folder: Path, *options: str) -> Iterator[Serving]:
    """Run a server that uses the machine's cache."""
    cache = ("--cache", str(gpu.folder / "cache"))
    with serving(gpu.package, folder, *ANY_PORTS, *cache, *options) as running:
        yield running


@pytest.fixture
def right(local: Local, tokenizer: Tokenizer) -> Right:
    """Return a function that checks whether a server's tokens equal the CPU's."""
    wanted = local("12+34=", seed=3, max_new_tokens=3, max_denoising_steps=2)

    def ask_it(running: Serving) -> bool:
        status, body, _ = ask(running, seed=3)
        assert status == 200, body
        return bool(body["choices"][0]["message"]["content"] == tokenizer.decode(wanted.token_ids))

    return ask_it


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill all processes of a service, as the end of their container would."""
    mark = f"-{process.pid}-"
    for number, line in command_lines().items():
        if mark in line and "canvasrt-" in line:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
    process.kill()
    process.communicate()


def log(running: Serving) -> str:
    return Path(running.said["log"]).read_text()


def test_a_killed_start_goes_on_and_the_next_compiles_nothing(
    gpu: Rehearsal, right: Right, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """During the start, the server is alive but not ready, so no liveness probe ends it."""
    monkeypatch.setenv("REHEARSAL_COMPILE", "0.5")
    monkeypatch.setenv("REHEARSAL_KERNELS", str(20 << 20))
    cache = gpu.folder / "cache"
    with bind("127.0.0.1", 0, "--port") as held:  # until the server listens
        port = str(held.getsockname()[1])
        options = (*ANY_PORTS[2:], "--port", port, "--cache", str(cache))
        process = started(gpu.package, tmp_path / "killed", *options)
        assert eventually(lambda: gpu.events()["compile"] >= 4)
    host = f"127.0.0.1:{port}"
    assert [call(host, f"/v1/health/{name}")[0] for name in ("live", "ready")] == [200, 503]
    kill_all(process)
    before = gpu.events()["compile"]
    gpu.forget()
    with start(gpu, tmp_path / "again") as running:
        assert right(running)
        passes = call(running.host, "/v1/metadata")[1]["passes"]
        # The fake GPU computes on a CPU, which may round differently at other widths.
        assert passes["shared"] or "in the request's own pass" in passes["why"]
        running.stop(signal.SIGTERM)
    after = gpu.events()["compile"]
    compiled = kernels_in(cache)
    # The kill may lose the shape that was being compiled.
    shapes = compiled.stat().st_size // (20 << 20)
    assert before + after - shapes in (0, 1)
    assert before < shapes
    gpu.forget()
    with start(gpu, tmp_path / "third") as running:
        assert right(running)
    assert gpu.events()["compile"] == 0


def test_contexts_that_memory_has_no_room_for_make_passes_slower(
    gpu: Rehearsal, right: Right, tmp_path: Path
):
    """Without memory for the shared contexts, the start fails and says why. The log has the plan and the progress."""
    shared = sum(len(each["profiles"]) for each in load_bundle(gpu.engines).manifest.segments)
    with start(gpu, tmp_path / "enough") as running:
        planned, _, passes = log(running).partition("warm-up pass 1 of ")
        assert json.loads(planned.partition("plan: ")[2].splitlines()[0])["profile"]["memory"]
        many = passes.partition(":")[0]
        assert f"warm-up pass {many} of {many}: " in passes
    taken = gpu.taken()
    gpu.forget()
    gpu.inject(f"memory {taken[shared]}")  # enough for one context of a place
    with start(gpu, tmp_path / "slower") as running:
        assert right(running)
        assert "runs in a shared context, which is slower" in log(running)
        assert gpu.events()["context"] == shared + 1
    gpu.inject(f"memory {taken[shared - 1] - 1}")
    process = started(gpu.package, tmp_path / "ended", *ANY_PORTS)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert "TensorRT created no execution context" in errors


@pytest.mark.parametrize("gpu", [H100], ids=["h100"], indirect=True)
@pytest.mark.parametrize("fault", ["", "capture"])
def test_a_capture_that_the_driver_invalidates_makes_passes_slower(
    fault: str, gpu: Rehearsal, right: Right, tmp_path: Path
):
    """With TensorRT, canvasrt captures CUDA graphs; TensorRT-RTX captures them itself."""
    gpu.inject(fault)
    with start(gpu, tmp_path / "captures") as running:
        assert all(right(running) for _ in range(3))
        refused = "without a CUDA graph: CUDA: operation failed due to a previous error during"
        assert (refused in log(running)) == bool(fault)
        assert (gpu.events()["capture"] == 0) == bool(fault)


def test_an_illegal_address_ends_the_service(gpu: Rehearsal, right: Right, tmp_path: Path):
    with start(gpu, tmp_path / "lost") as running:
        assert right(running)
        gpu.inject("illegal")
        watch = Watch(running)
        status, body, _ = ask(running)
        assert (status, body["error"]["type"]) == (500, "server_error")
        watch.ends(3, "an illegal memory access was encountered")
    gpu.inject("")
    with start(gpu, tmp_path / "restarted") as running:
        assert right(running)
