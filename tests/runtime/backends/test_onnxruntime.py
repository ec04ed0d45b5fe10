"""Memory that ONNX Runtime sessions share on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, save

from canvasrt.runtime.backends import onnxruntime as backend
from canvasrt.runtime.backends.onnxruntime import SMALL_PASS, OrtBackend, drop_pages


def graph(folder: Path) -> Path:
    info = [helper.make_tensor_value_info(each, TensorProto.FLOAT, ["n"]) for each in "xy"]
    made = helper.make_graph([helper.make_node("Exp", ["x"], ["y"])], "exp", info[:1], info[1:])
    save(
        helper.make_model(made, opset_imports=[helper.make_opsetid("", 23)], ir_version=11),
        folder / "exp.onnx",
    )
    return folder / "exp.onnx"


@pytest.mark.parametrize(("work", "shared"), [(SMALL_PASS, "1"), (SMALL_PASS - 1, "")])
def test_sessions_of_a_large_model_share_one_arena_without_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: int, shared: str
) -> None:
    seen: list[ort.SessionOptions] = []
    real = backend._options
    monkeypatch.setattr(backend, "_options", lambda threads: seen.append(real(threads)) or seen[-1])
    opened = OrtBackend(threads=1, work=work)
    segments = [opened.open(name, graph(tmp_path)) for name in ("first", "second")]
    x = np.linspace(-2, 2, 7, dtype=np.float32)
    for segment in segments:
        np.testing.assert_allclose(segment.run({"x": x})["y"], np.exp(x), rtol=1e-6)
    key = "session.use_env_allocators"
    for options in seen:
        try:
            found = options.get_session_config_entry(key)
        except RuntimeError:
            found = ""
        assert found == shared
        # With a memory pattern, a pass's memory would be allocated a second time, and the arena would keep it.
        assert options.enable_mem_pattern == (not shared)
        # Planning reuse takes a third of the time to load three layers of the released size.
        assert options.enable_mem_reuse == (not shared)


def resident(file: Path) -> int:
    """Return the resident bytes of a file's mappings."""
    size, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            inside = rest[-1:] == [str(file)]
        elif inside and first == "Rss:":
            size += 1024 * int(rest[0])
    return size


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="needs Linux")
def test_pages_read_at_load_are_given_up_and_what_was_written_is_kept(tmp_path: Path) -> None:
    file = tmp_path.resolve() / "weights.bin"
    data = np.arange(1 << 20, dtype=np.float32)
    data.tofile(file)
    os.sync()  # pages that are not written yet would stay in memory
    mapped = np.memmap(file, np.float32, "c")
    mapped[0] = 7
    assert mapped.sum() > 0
    before = resident(file)
    assert before >= data.nbytes
    drop_pages(file)
    assert resident(file) < before / 4
    np.testing.assert_array_equal(mapped[1:], data[1:])
    assert mapped[0] == 7
