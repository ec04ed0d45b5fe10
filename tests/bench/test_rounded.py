"""bench.rounded: which matrices it rounds, and what AWQ's scales gain where inputs differ."""

from __future__ import annotations

import torch

from bench.rounded import KINDS, Inputs, ProductInputs, round_all, rounded, scaled


def test_only_matrices_of_its_kinds_are_rounded() -> None:
    prefix = "model.decoder.layers.0"
    random = torch.Generator().manual_seed(1)
    tensors = {
        f"{prefix}.{name}": torch.randn(shape, generator=random)
        for name, shape in {
            "self_attn.q_proj.weight": (8, 128),
            "mlp.down_proj.weight": (8, 128),
            "experts.gate_up_proj": (2, 8, 128),
            "self_attn.q_norm.weight": (128,),
            "router.proj.weight": (8, 128),
        }.items()
    }
    made = round_all(tensors, {}, "mse", KINDS)
    changed = {
        name.removeprefix(f"{prefix}.") for name in made if (made[name] != tensors[name]).any()
    }
    assert changed == {"self_attn.q_proj.weight", "mlp.down_proj.weight", "experts.gate_up_proj"}
    for expert in range(2):
        name = f"{prefix}.experts.gate_up_proj"
        assert (made[name][expert] == rounded(tensors[name][expert], "mse")).all()


def test_scaled_inputs_keep_what_matters() -> None:
    """Few inputs are large, and their weights are rounded as if they were large, too."""
    random = torch.Generator().manual_seed(2)
    weight = torch.randn(16, 128, generator=random)
    rows = torch.randn(256, 128, generator=random)
    rows[:, ::32] *= 30
    with ProductInputs() as found:
        torch.nn.functional.linear(rows, weight)
    seen = found.seen[weight.data_ptr()]
    assert seen.count == 256

    def error(made: torch.Tensor) -> float:
        return float(((made - weight) @ rows.T).square().mean())

    assert error(scaled(weight, seen, "max")) < 0.5 * error(rounded(weight, "max"))
    assert (scaled(weight, Inputs(), "mse") == rounded(weight, "mse")).all()
