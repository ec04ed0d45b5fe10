"""What is reported about this machine."""

from __future__ import annotations

from canvasrt.machine import Gpu, description, memory_bytes, parse_gpu


def test_lines_of_nvidia_smi() -> None:
    line = "NVIDIA GeForce RTX 5090, 32607, 12.0, 580.65"
    expected = Gpu("NVIDIA GeForce RTX 5090", 32_607 * 2**20, (12, 0), "580.65")
    assert parse_gpu(line) == expected
    assert parse_gpu("No devices were found") is None
    assert parse_gpu("a, b, c, d") is None


def test_unified_memory_counts_the_host_s() -> None:
    gpu = parse_gpu("NVIDIA GB10, [N/A], 12.1, 580.65")
    assert gpu is not None
    assert gpu.memory == memory_bytes()


def test_the_description_is_plausible() -> None:
    found = description()
    assert found["processors"] >= 1
    assert found["memory"] > 2**28
