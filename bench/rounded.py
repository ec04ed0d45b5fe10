"""Writes a checkpoint whose matrices are rounded to INT4, to see what a way of choosing scales costs.

    python -m bench.rounded demo --scales awq -o rounded
    canvasrt build rounded --target cpu --precision fp32 -o rounded-cpu
    canvasrt verify rounded-cpu --reference demo --questions 0 --report report-rounded

`max` lets each block reach its largest number, `mse` takes the least squared error. `awq` and `awq-mse` also scale each
matrix's inputs by a power of their mean magnitude, the one that changes its outputs least (Lin et al., 2023,
"AWQ: Activation-aware Weight Quantization"). Inputs are seen while transformers answers the demo's calibration prompts.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoTokenizer

from canvasrt.checkpoints.locate import DEMO_FOLDER, find_checkpoint
from canvasrt.export.quantize.quantizers import quantize_weight
from canvasrt.fidelity.reference import ReferenceModel
from canvasrt.graphs import lowbits
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams

KINDS = "layers.*.self_attn.[qkvo]_proj.weight layers.*.mlp.*_proj.weight layers.*.experts.*_proj"
# Rows of inputs that are kept of each matrix, and powers that are tried.
ROWS, POWERS = 512, [n / 20 for n in range(21)]


@dataclass
class Inputs:
    """What one matrix was multiplied by."""

    total: Tensor | float = 0.0
    count: int = 0
    rows: list[Tensor] = field(default_factory=list)

    def see(self, values: Tensor) -> None:
        rows = values.detach().reshape(-1, values.shape[-1])
        self.total = self.total + rows.abs().sum(0)
        self.count += len(rows)
        if sum(map(len, self.rows)) < ROWS:
            self.rows.append(rows[:: max(1, len(rows) // 16)].clone())


class ProductInputs(TorchFunctionMode):
    """Notes the inputs of every linear product, by the address of its weight."""

    def __init__(self) -> None:
        self.seen: dict[int, Inputs] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            self.seen.setdefault(args[1].data_ptr(), Inputs()).see(args[0])
        return func(*args, **(kwargs or {}))


def watch(checkpoint: Path, prompts: int) -> dict[str, list[Inputs]]:
    """Return the inputs of each matrix, by its name from `layers` on; of experts, one by one."""
    model = ReferenceModel(checkpoint)
    model.module.set_experts_implementation("eager")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    lines = (DEMO_FOLDER / "calibration.jsonl").read_text(encoding="utf-8").splitlines()[:prompts]
    requests = [
        Request(tokenizer(json.loads(line)["prompt"]).input_ids, SamplingParams(seed=number))
        for number, line in enumerate(lines)
    ]
    with ProductInputs() as found:
        Generator(model).run(requests)
    held = {}
    for name, weight in model.module.named_parameters():
        parts = weight if weight.ndim == 3 else [weight]
        held[short(name)] = [found.seen.get(part.data_ptr(), Inputs()) for part in parts]
    return held


def rounded(weight: Tensor, method: Literal["max", "mse"]) -> Tensor:
    """Return a matrix `[out, in]` rounded to INT4."""
    packed = quantize_weight([weight.numpy()], "int4", None, method)
    values = lowbits.dequantize("int4", packed.values, packed.scale, packed.block_scales)
    return torch.from_numpy(values).reshape(weight.shape)


def scaled(weight: Tensor, seen: Inputs, method: Literal["max", "mse"]) -> Tensor:
    """Return a matrix rounded with its inputs scaled, and divided by the scales again."""
    if not seen.count:
        return rounded(weight, method)
    rows, mean = torch.cat(seen.rows), (seen.total / seen.count).clamp(min=1e-4)
    tried = []
    for power in POWERS:
        scales = mean**power
        scales = scales / (scales.max() * scales.min()).sqrt()
        values = rounded(weight * scales, method) / scales
        tried.append((float(((values - weight) @ rows.T).square().sum()), values))
    return min(tried, key=lambda each: each[0])[1]


def short(name: str) -> str:
    """Return a tensor's name from `layers` on, as encoder and decoder share it."""
    return name[name.find("layers.") :]


def round_all(
    tensors: Mapping[str, Tensor], seen: Mapping[str, list[Inputs]], scales: str, kinds: str
) -> dict[str, Tensor]:
    """Return a checkpoint's tensors in float32, those of `kinds` rounded."""
    method: Literal["max", "mse"] = "mse" if scales.endswith("mse") else "max"
    made = {}
    for name, tensor in tensors.items():
        wide = tensor.to(torch.float32)
        if "vision" not in name and any(fnmatch(short(name), each) for each in kinds.split()):
            parts = list(wide) if wide.ndim == 3 else [wide]
            if scales.startswith("awq"):
                each = zip(parts, seen[short(name)], strict=True)
                parts = [scaled(part, inputs, method) for part, inputs in each]
            else:
                parts = [rounded(part, method) for part in parts]
            wide = torch.stack(parts).reshape(wide.shape)
        made[name] = wide.contiguous()
    return made


def main() -> None:
    """Write the checkpoint that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("checkpoint", help="a checkpoint of one file")
    parser.add_argument("--scales", choices=["max", "mse", "awq", "awq-mse"], default="mse")
    parser.add_argument("--kinds", default=KINDS, help="patterns of tensors, from `layers` on")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    source = find_checkpoint(args.checkpoint)
    seen = watch(source, args.prompts) if args.scales.startswith("awq") else {}
    shutil.copytree(source, args.out)
    file = args.out / "model.safetensors"
    made = round_all(load_file(file), seen, args.scales, args.kinds)
    save_file(made, file, {"format": "pt"})


if __name__ == "__main__":
    main()
