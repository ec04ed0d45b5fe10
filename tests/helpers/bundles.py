"""Small bundles with made-up files."""

from __future__ import annotations

from pathlib import Path

from canvasrt.bundle import Bundle, load_bundle, write_manifest
from canvasrt.checkpoints.config import read_config
from canvasrt.staging import staging
from tests.conftest import CONFIG, GENERATION_CONFIG

MODEL, SAMPLER = read_config(CONFIG, GENERATION_CONFIG)


def make(out: Path, kind: str = "graphs") -> Bundle:
    with staging(out) as tmp:
        (tmp / "tokenizer").mkdir()
        (tmp / "body_0.onnx").write_bytes(b"graph" * 100)
        (tmp / "embedding.bin").write_bytes(bytes(range(256)) * 8)
        (tmp / "empty").write_bytes(b"")
        (tmp / "tokenizer" / "tokenizer.json").write_text("{}")
        write_manifest(
            tmp,
            kind=kind,
            made_from={"checkpoint": {"config.json": "0" * 64}},
            options={"precision": "fp32"},
            model=MODEL,
            sampler=SAMPLER,
            segments=[{"name": "body_0", "file": "body_0.onnx", "layers": [0, 1]}],
            embedding={"file": "embedding.bin", "dtype": "float32", "shape": [96, 32]},
            tokenizer=["tokenizer/tokenizer.json"],
            packages=("numpy", "no-such-distribution"),
        )
    return load_bundle(out)
