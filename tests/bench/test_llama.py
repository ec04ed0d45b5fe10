"""The comparison with llama.cpp, on a tiny shape: both sides compute the same, and a difference is noticed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs canvasrt[export]")
gguf = pytest.importorskip("gguf", reason="needs `pip install xllamacpp gguf`")
pytest.importorskip("xllamacpp", reason="needs `pip install xllamacpp gguf`")

from bench import llama  # noqa: E402
from bench.gguf_file import q4_0, write_gguf  # noqa: E402
from bench.llama_library import find_library  # noqa: E402
from canvasrt.errors import CanvasError  # noqa: E402
from canvasrt.export import synthetic  # noqa: E402

TINY = synthetic.SHAPES["released"] | {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "tiny", TINY)


def test_blocks_have_the_same_values() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**31), 2**31, (3, 16), np.int32)  # 128 codes per row
    scales = rng.uniform(0.001, 0.1, (3, 2)).astype(np.float16).astype(np.float32)
    codes = (words[..., None].view(np.uint32) >> (4 * np.arange(8, dtype=np.uint32))) & 15
    expected = (codes.reshape(3, 2, 64).astype(np.float32) - 8) * scales[..., None]
    found = gguf.quants.dequantize(q4_0(words, scales), gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(found, expected.reshape(3, 128))


def test_both_sides_are_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--shape", "tiny", "--layers", "2", "--threads", "1", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["llama", *options, "-o", str(folder)])
    llama.main()
    report = json.loads((folder / "llama.json").read_text())
    assert [(row["threads"], row["tokens"]) for row in report["rows"]] == [(1, 256), (1, 512)]
    assert list(report["sides"]) == ["canvasrt", "xllamacpp"]
    for side in report["sides"].values():
        used = side["threads"]["1"]
        assert used["cosine"] > 0.999
        assert used["memory"][0] > used["memory"][1] > 10**6
    for row in report["rows"]:
        assert min(*row["wall"], *row["cpu"], row["rate"], row["our_rate"]) > 0
        assert len(row["seconds"]["canvasrt"]) == len(row["wall"]) == 2
    assert report["multiply_adds"] == work()
    assert "REPACK" in report["sides"]["xllamacpp"]["about"]["system"]
    assert "| xllamacpp | 1 | 512 |" in (folder / "llama.md").read_text()


def work() -> int:
    """The elements of all INT4 matrices that a token meets."""
    sliding = 128 * 32 * (4 + 2 + 2 + 4)
    full = 128 * 64 * (4 + 1 + 4)
    return sliding + full + 2 * 3 * 128 * (192 + 2 * 64)


def test_other_weights_are_noticed(folder: Path) -> None:
    bundle, same, config = llama.prepare(folder, "tiny", 2)
    other = folder / "other.gguf"
    table = np.random.default_rng(0).standard_normal((config.vocab_size, config.hidden_size))
    write_gguf(folder / "tiny-2-checkpoint", config, table.astype(np.float32), other)
    assert other.stat().st_size == same.stat().st_size
    makers = {llama.OURS: (llama.Ours, bundle), "other": (llama.Theirs, find_library(), other)}
    with pytest.raises(CanvasError, match="have a cosine of"):
        llama.measure(makers, config, 1, 1, llama.Report({}, 1))
