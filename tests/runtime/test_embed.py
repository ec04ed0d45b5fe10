"""Embeddings on the host equal those of transformers in the table's dtype, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from canvasrt.runtime.bundle_facts import scaled_embeddings


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaled_embeddings(dtype: str) -> None:
    """2816 is the released hidden size. Its root, 53.07, is rounded to 53 in bf16."""
    from transformers.models.diffusion_gemma import modeling_diffusion_gemma as reference

    kind = next(v for name, v in vars(reference).items() if name.endswith("ScaledWordEmbedding"))
    size, count = 2816, 16
    module = kind(count, size, 0, embed_scale=size**0.5).to(getattr(torch, dtype))
    weight = module.weight.detach()
    host = np.dtype(getattr(ml_dtypes, dtype, dtype))
    table = weight.float().numpy().astype(host)
    found = scaled_embeddings(table, np.arange(count)).astype(host).astype(np.float32)
    assert np.array_equal(found, module(torch.arange(count)).detach().float().numpy())
