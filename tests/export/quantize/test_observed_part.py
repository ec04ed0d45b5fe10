"""The modules that calibration observes compute what the graphs' modules do."""

from __future__ import annotations

import pytest
import torch

from canvasrt.export.head import Head
from canvasrt.export.quantize import observed_part
from tests.helpers.configs import CONFIG


@torch.no_grad()
def test_the_table_is_widened_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed_part, "_ROWS", 100)
    whole, pieces = Head(CONFIG), observed_part.PiecewiseHead(CONFIG)
    random = torch.Generator().manual_seed(0)
    for name, shape in [(name, each.shape) for name, each in whole.named_parameters()]:
        values = torch.randn(shape, generator=random).bfloat16()
        owner, _, own = name.rpartition(".")
        narrow = values if name == "table" else values.float()
        for head, chosen in ((whole, values.float()), (pieces, narrow)):
            head.get_submodule(owner)._parameters[own] = torch.nn.Parameter(chosen, False)
    length = CONFIG.canvas_length
    inputs = (
        torch.randn(1, length, CONFIG.hidden_size, generator=random),
        torch.tensor([0.7]),
        torch.tensor([1.0]),
        torch.rand(1, length, generator=random),
        torch.zeros(1, length, dtype=torch.int64),
    )
    assert pieces.table.dtype == torch.bfloat16
    for one, other in zip(whole(*inputs), pieces(*inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
