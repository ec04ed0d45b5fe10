"""The report about this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from canvasrt import machine
from canvasrt.containers.serve.gpus import use_gpu
from canvasrt.containers.serve.local import best_target
from canvasrt.errors import UsageError
from canvasrt.machine import Gpu, memory_bytes, parse_gpu


def test_lines_of_nvidia_smi() -> None:
    line = "NVIDIA GeForce RTX 5090, 32607, 12.0, 580.65, GPU-5a"
    expected = Gpu("NVIDIA GeForce RTX 5090", 32_607 * 2**20, (12, 0), "580.65", "GPU-5a")
    assert parse_gpu(line) == expected
    assert parse_gpu("No devices were found") is None
    assert parse_gpu("a, b, c, d, e") is None


def test_why_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason quotes nvidia-smi, which fails after a driver update, for example, although the machine has a GPU."""
    said = "Failed to initialize NVML: Driver/library version mismatch"
    for script, why in (
        (f"echo '{said}'; exit 18", f"nvidia-smi failed: {said}"),
        ("echo 'No devices were found'; exit 6", "nvidia-smi failed: No devices were found"),
        ("true", "nvidia-smi reports no GPU"),
        ("echo 'L4, 1, 8.9, 580.1, GPU-1'", "CUDA_VISIBLE_DEVICES is '', which names no GPU here"),
    ):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setenv(machine.VISIBLE, "")
        machine._asked.cache_clear()
        assert not machine.gpus()
        assert machine.why_no_gpu() == why
        assert why in best_target()[1]
    machine._asked.cache_clear()


def test_unified_memory_counts_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's memory limit does not count, since it applies to processes, not to the GPU."""
    monkeypatch.setattr(Path, "read_text", lambda _: f"{2**30}")
    gpu = parse_gpu("NVIDIA GB10, [N/A], 12.1, 580.65, GPU-1")
    assert gpu is not None
    assert gpu.memory > memory_bytes() == 2**30


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """Three GPUs, the first the oldest. By default, CUDA would give number 0 to the fastest."""
    made = [
        Gpu(f"GPU {n}", 10**10, (8 + n, 0), "580", f"GPU-{each}")
        for n, each in enumerate(("aa1", "bb2", "cc3"))
    ]
    monkeypatch.setattr(machine, "_listed", lambda: tuple(made))
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    return made


@pytest.mark.parametrize("name", ["1", "GPU-bb2", "GPU-b"])
def test_a_gpu_is_chosen_by_number_or_uuid(
    name: str, three: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Child processes see only the chosen GPU."""
    # monkeypatch then restores the variable, which use_gpu sets.
    monkeypatch.setenv(machine.VISIBLE, "0,1")
    use_gpu(name)
    assert machine.gpus() == (three[1],)
    assert os.environ[machine.VISIBLE] == "GPU-bb2"


def test_only_visible_gpus_are_there(three: list[Gpu], monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.gpus() == tuple(three)
    for names, seen in (("2,GPU-aa1", [2, 0]), ("", []), ("7", []), ("MIG-1", [0, 1, 2])):
        monkeypatch.setenv(machine.VISIBLE, names)
        assert machine.gpus() == tuple(three[number] for number in seen)


@pytest.mark.parametrize("name", ["3", "GPU-d", "GPU-", "x", "0,1", ""])
def test_a_gpu_that_is_not_there_is_refused(name: str, three: list[Gpu]) -> None:
    """A prefix that several GPUs share is refused, too."""
    with pytest.raises(UsageError, match="there is no GPU") as caught:
        use_gpu(name)
    assert "1: GPU 1, GPU-bb2" in caught.value.hint
