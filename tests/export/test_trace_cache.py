"""Traced graphs are cached by the structure of the module, not by its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from canvasrt.export import onnx


class Scale(nn.Module):
    """Computes `x · weight · factor + constant`."""

    def __init__(self, size: int = 4, factor: float = 2.0, constant: float = 0.5) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.rand(size))
        self.register_buffer("constant", torch.tensor([constant]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.factor + self.get_buffer("constant")


def trace(module: Scale, dtype: torch.dtype = torch.float32) -> bytes:
    inputs = {"x": torch.zeros(3, len(module.weight), dtype=dtype)}
    model = onnx.trace(module, inputs, {"x": {0: torch.export.Dim("rows")}}, ["x"], ["y"])
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def test_only_what_decides_a_graph_is_traced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANVASRT_CACHE", str(tmp_path))
    calls: list[Any] = []
    really = torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", lambda *a, **kw: calls.append(a) or really(*a, **kw))
    first = trace(Scale())
    assert trace(Scale()) == first  # other weights, same structure
    assert len(calls) == 1
    others = [Scale(size=5), Scale(factor=3.0), Scale(constant=1.0), Scale().to(torch.bfloat16)]
    assert len({first, *(trace(each, each.weight.dtype) for each in others)}) == 5
    assert len(calls) == 5
    for file in (tmp_path / "traces").iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert trace(Scale()) == first  # a damaged file is ignored
    assert len(calls) == 6
    monkeypatch.setenv("CANVASRT_CACHE", "/dev/null/no-folder")
    assert trace(Scale()) == first
    assert len(calls) == 7
