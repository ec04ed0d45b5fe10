"""Rounds both operands of the product that gives the logits, and compares the probabilities.

    python -m bench.logits

Asks stock `transformers` held-out questions of the demo model, keeps the hidden states of all steps, and multiplies them
once more by the rounded table. Nothing else is rounded, and no step sees another's error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from canvasrt.checkpoints.locate import demo_checkpoint
from canvasrt.demo.evaluate import generate
from canvasrt.demo.tasks import TASKS
from canvasrt.fidelity.prompts import spread
from canvasrt.formats import E2M1, E4M3, FORMATS

Rounding = Callable[[Tensor], Tensor]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench.logits", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, default=demo_checkpoint())
    parser.add_argument("--questions", type=int, default=4, help="per task")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(options.checkpoint, dtype="float32")
    hidden = states(model.eval(), options.checkpoint, options.questions)
    table = model.lm_head.weight.detach()
    cap = model.config.text_config.final_logit_softcapping
    print("| rounded to | mean KL | 99th percentile | same best token |\n| --- | --- | --- | --- |")
    for name, rounding in (("FP8", fp8), ("NVFP4", nvfp4)):
        kl, same = divergence(hidden, table, rounding, cap)
        print(f"| {name} | {kl.mean():.1e} | {kl.quantile(0.99):.1e} | {same:.2%} |")
    print(f"{len(hidden):,} positions, at a temperature of 1")
    return 0


def states(model: DiffusionGemmaForBlockDiffusion, checkpoint: Path, questions: int) -> Tensor:
    """Return the hidden states `[N, D]` before the vocabulary's product, of all denoising steps."""
    kept: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, given, __: kept.append(given[0].detach()))
    asked = [each for task in TASKS for each in spread(task, questions)]
    generate(model, AutoTokenizer.from_pretrained(checkpoint), asked)
    hook.remove()
    return torch.cat([each.flatten(0, -2) for each in kept])


def divergence(
    hidden: Tensor, table: Tensor, rounding: Rounding, cap: float
) -> tuple[Tensor, float]:
    """Return each position's KL divergence in nats `[N]`, and the share of positions with the same best token."""

    def logs(states: Tensor, table: Tensor) -> Tensor:
        return torch.log_softmax(cap * torch.tanh(states @ table.t() / cap), -1)

    exact, rounded = logs(hidden, table), logs(rounding(hidden), rounding(table))
    kl = (exact.exp() * (exact - rounded)).sum(-1)
    return kl, (exact.argmax(-1) == rounded.argmax(-1)).double().mean().item()


def fp8(x: Tensor) -> Tensor:
    """Round to E4M3 with one scale."""
    from modelopt.torch.quantization.qtensor import FP8QTensor

    quantized, scale = FP8QTensor.quantize(x, scales=x.abs().amax() / E4M3.largest)
    return quantized.dequantize(torch.float32, scale=scale)


def nvfp4(x: Tensor) -> Tensor:
    """Round to E2M1 with a scale in E4M3 per block, and one for all."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    (block,) = FORMATS["nvfp4"].blocks
    scale = x.abs().amax() / (E2M1.largest * E4M3.largest)
    quantized, scales, _ = NVFP4QTensor.quantize(x, block, weights_scaling_factor_2=scale)
    sizes = {-1: block}
    return quantized.dequantize(
        torch.float32, scale=scales, double_scale=scale, block_sizes=sizes, fast=False
    )


if __name__ == "__main__":
    sys.exit(main())
