"""A checkpoint served directly: the choice of a target, and that it is built once."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from canvasrt import machine
from canvasrt.checkpoints.locate import demo_checkpoint
from canvasrt.containers.serve import local
from canvasrt.containers.serve.build_engines import Wait
from canvasrt.containers.serve.prepare import alone
from canvasrt.errors import CanvasError
from canvasrt.machine import Gpu
from canvasrt.progress import listening
from canvasrt.targets import find_target
from tests.conftest import Command
from tests.helpers import library

GB = 10**9


def gpu(name: str, memory: int, capability: tuple[int, int]) -> Gpu:
    return Gpu(name, memory * GB, capability, "600.1")


@pytest.fixture
def everything_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "builds_here", lambda target: "")
    monkeypatch.setattr(machine, "runs_here", lambda target: "")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (gpu("NVIDIA GeForce RTX 4090", 25, (8, 9)), "rtx-4090"),
        (gpu("NVIDIA L40S", 48, (8, 9)), "l40s"),
        (gpu("NVIDIA L4", 24, (8, 9)), "l4"),
        (gpu("NVIDIA H200", 150, (9, 0)), "h200"),
        (gpu("NVIDIA RTX 5000 Ada Generation", 34, (8, 9)), "rtx-4090"),  # nearest in memory
        (gpu("NVIDIA RTX A5000", 24, (8, 6)), "rtx-3090"),  # not `rtx`
        (gpu("NVIDIA RTX 4000 Ada", 20, (8, 9)), "rtx-4080"),  # nearest that fits
    ],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_the_gpus_target_is_chosen(everything_builds: None, found: Gpu, expected: str) -> None:
    target, why = local.best_target([found])
    assert (target.name, why) == (expected, "")


def test_the_largest_of_several_gpus_is_chosen(everything_builds: None) -> None:
    small, large = gpu("NVIDIA L4", 24, (8, 9)), gpu("NVIDIA H100", 80, (9, 0))
    assert local.best_target([small, large])[0].name == "h100"


def test_without_a_usable_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local.best_target([])[0].name == "cpu"
    old = gpu("Tesla V100", 32, (7, 0))
    target, why = local.best_target([old])
    assert (target.name, why) == ("cpu", "there is no target for Tesla V100")
    monkeypatch.setattr(machine, "builds_here", lambda target: "needs canvasrt[rtx]")
    target, why = local.best_target([gpu("NVIDIA L4", 24, (8, 9))])
    assert (target.name, why) == ("cpu", "l4 needs canvasrt[rtx]")


def test_an_old_driver_is_noticed_before_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old driver is found when the target is chosen, not only when engines are loaded."""
    old = Gpu("NVIDIA L4", 24 * GB, (8, 9), "575.51")
    monkeypatch.setattr(machine, "gpus", lambda: (old,))
    monkeypatch.setattr(machine, "builds_here", lambda target: "")
    target, why = local.best_target()
    assert target.name == "cpu"
    assert "needs a driver of 580 or newer; this machine has 575.51" in why


def test_what_is_a_checkpoint(checkpoint_files: Path, tmp_path: Path) -> None:
    assert local.is_checkpoint(checkpoint_files)
    assert local.is_checkpoint(Path("demo"))
    assert local.is_checkpoint(Path("demo-vision"))
    assert local.is_checkpoint(Path("google/diffusiongemma-26B-A4B-it"))
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "manifest.json").write_text("{}")
    assert not local.is_checkpoint(tmp_path / "engines")
    assert not local.is_checkpoint(Path("/no/such/folder"))
    assert not local.is_checkpoint(Path("../nothing"))


def test_engines_are_found_again_until_the_checkpoint_changes(
    checkpoint_files: Path, tmp_path: Path
) -> None:
    first = local.plan_local(checkpoint_files, tmp_path)
    assert local.plan_local(checkpoint_files, tmp_path) == first
    os.utime(checkpoint_files / "model.safetensors", (1, 1))
    assert local.plan_local(checkpoint_files, tmp_path).engines != first.engines


def test_a_build_that_fails_is_explained(checkpoint_files: Path, tmp_path: Path) -> None:
    """The build fails, since the checkpoint's weights are not those of a network."""
    said: list[str] = []
    with pytest.raises(CanvasError, match=r"cannot build .* for cpu: .* has no tensor") as refused:
        local.build_local(local.plan_local(checkpoint_files, tmp_path), said.append)
    assert refused.value.hint
    assert "this happens once" in said[0]


def test_engines_that_this_machine_cannot_hold_are_not_built(
    checkpoint_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: 10**6)
    made = local.plan_local(checkpoint_files, tmp_path)
    with pytest.raises(CanvasError, match=r"but this machine has 0\.0 GB"):
        local.build_local(made, print)
    assert not made.is_built
    monkeypatch.setattr(machine, "gpus", lambda: [gpu("NVIDIA GeForce RTX 3060", 12, (8, 6))])
    assert local._memory_for(find_target("rtx-3090")) == 12 * GB


def test_the_demo_is_built_once(tmp_path: Path) -> None:
    found = local.plan_local(demo_checkpoint(), library.empty_cache(tmp_path))
    said: list[str] = []
    doing: set[str] = set()
    with listening(lambda what, done, total: doing.add(what)):
        local.build_local(found, said.append)
    assert found.is_built
    assert "exporting graphs (fp32)" in doing
    assert len(said) == 1
    lock = found.engines.with_name(f"{found.engines.name}.lock")
    lock.unlink()
    lock.mkdir()  # as if the cache were read-only
    local.build_local(found, said.append)
    assert len(said) == 1


def test_that_another_server_builds_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    stop, looks = threading.Event(), iter(range(4))

    def look() -> None:
        if next(looks) == 3:
            stop.set()

    with alone(tmp_path / "engines", Wait()):
        with alone(tmp_path / "engines", Wait(stop, said.append, look)):
            assert len(said) == 1


def test_a_dry_run_says_what_would_be_built(command: Command, tmp_path: Path) -> None:
    done = command("serve", "demo", "--cache", tmp_path, "--dry-run", "--json")
    decided = json.loads(done.stdout)
    assert decided["builds_first"]
    assert decided["target"] in ("cpu", *(target.name for target in local.TARGETS))
    assert ("why" in decided) == (decided["target"] == "cpu")
    assert list(tmp_path.iterdir()) == []
