"""Trains the demo checkpoint and its undertrained twin on a CPU.

python -m canvasrt.demo.train --seed 0 --out DIR

It writes `DIR/checkpoint` and `DIR/undertrained`, and regularly `DIR/latest`. Training takes about
an hour on three cores; if other programs use them too, `OMP_WAIT_POLICY=PASSIVE` is several times
faster. The seed, the number of steps and the number of threads determine the weights.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast

from canvasrt.demo.data import Batch, Examples
from canvasrt.demo.model import CANVAS_LENGTH, FastForward, build_model
from canvasrt.demo.muon import Muon
from canvasrt.demo.tasks import TASKS
from canvasrt.demo.tokenizer import build_tokenizer

# A few examples have prefixes of whole blocks, and a part of their own.
BATCH_PARTS = (56, 56, 16)
MUON_RATE, ADAM_RATE = 0.02, 3e-3
AVERAGING = 0.998
BALANCE_WEIGHT = 0.01
UNDERTRAINED_AT = 0.4  # share of all steps


def corrupt(block: Tensor, keep: Tensor, vocab_size: int) -> Tensor:
    """Put uniform noise wherever `keep` is False: there is no mask token."""
    return torch.where(keep, block, torch.randint_like(block, vocab_size))


def first_canvas(block: Tensor, vocab_size: int) -> Tensor:
    """Return a first canvas: often all noise, as in a first step, else any share of it."""
    level = torch.rand(len(block), 1)
    level = torch.where(torch.rand(len(block), 1) < 0.35, 1.0, level)
    return corrupt(block, torch.rand(block.shape) >= level, vocab_size)


def second_canvas(block: Tensor, logits: Tensor) -> Tensor:
    """Return a canvas as the sampler might leave it after a step that gave `logits`.

    Most examples keep the positions that an entropy bound accepts, for bounds from the released 0.1
    up, and have the right token there: what a step accepts is part of one right answer among many.
    The rest keep random positions. In some, part of the noise is the model's own draws.
    """
    rows, vocab_size = len(block), logits.shape[-1]
    log_probabilities = logits.log_softmax(-1)
    probabilities = log_probabilities.exp()
    entropy, order = (-probabilities * log_probabilities).sum(-1).sort(-1)
    bound = 0.1 * torch.exp(5 * torch.rand(rows, 1))
    accepted = torch.zeros_like(block, dtype=torch.bool).scatter(
        -1, order, entropy.cumsum(-1) - entropy <= bound
    )
    random_keep = torch.rand(block.shape) >= torch.rand(rows, 1)
    keep = torch.where(torch.rand(rows, 1) < 0.6, accepted, random_keep)
    canvas = corrupt(block, keep, vocab_size)
    drawn = torch.multinomial(probabilities.flatten(0, 1), 1).view_as(block)
    draw_share = 0.5 * torch.rand(rows, 1) * (torch.rand(rows, 1) < 0.25)
    return torch.where(torch.rand(block.shape) < draw_share, drawn, canvas)


def loss_of(forward: FastForward, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the training loss, and each example's cross-entropy in the second pass (detached).

    There are two denoising steps, as in generation: the second is conditioned on the first's
    logits.
    """
    vocab_size = forward.config.vocab_size
    prefix = forward.encode(batch.prefix, batch.padding)
    first, first_balance = forward.denoise(first_canvas(batch.block, vocab_size), prefix)
    temperature = torch.empty(len(batch.block), 1, 1).uniform_(0.4, 1.0)
    signal = first.detach() / temperature
    second, second_balance = forward.denoise(second_canvas(batch.block, signal), prefix, signal)
    # The filler after the answer counts as much as the answer; otherwise the model does not stop.
    entropies = [
        F.cross_entropy(logits.transpose(1, 2), batch.block, reduction="none").mean(-1)
        for logits in (first, second)
    ]
    balance = prefix.balance + first_balance + second_balance
    return (entropies[0] + entropies[1]).mean() + BALANCE_WEIGHT * balance, entropies[1].detach()


def build_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, and AdamW for the rest."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if "vision" in name:
            continue
        inner = parameter.ndim >= 2 and "embed" not in name and "router" not in name
        (matrices if inner else rest).append(parameter)
    return [
        Muon(matrices, lr=MUON_RATE),
        torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_factor(step: int, steps: int) -> float:
    """Return the rate: up over the first 100 steps, level, then down to zero over the second half."""
    return min(1.0, (step + 1) / 100, 2 * (1 - step / steps))


def save(
    model: DiffusionGemmaForBlockDiffusion, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write the Hugging Face layout in bf16 to a temporary folder, then move it into place."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    copy.deepcopy(model).bfloat16().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "model.safetensors").chmod(0o644)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def train(seed: int, steps: int, out: Path, save_every: int) -> None:
    torch.manual_seed(seed)
    model, tokenizer = build_model(), build_tokenizer()
    averaged = copy.deepcopy(model)
    forward = FastForward(model)
    examples = Examples(tokenizer, CANVAS_LENGTH, seed)
    optimizers = build_optimizers(model)
    by_task = torch.full((len(TASKS),), float("nan"))
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    for step in range(steps):
        for optimizer in optimizers:
            base = MUON_RATE if isinstance(optimizer, Muon) else ADAM_RATE
            optimizer.param_groups[0]["lr"] = base * rate_factor(step, steps)
            optimizer.zero_grad()
        for batch in examples.batches(BATCH_PARTS):
            loss, entropies = loss_of(forward, batch)
            (loss * len(batch.block) / sum(BATCH_PARTS)).backward()
            for task in batch.tasks.unique():
                now = entropies[batch.tasks == task].mean()
                by_task[task] = now if by_task[task].isnan() else by_task[task].lerp(now, 0.02)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        decay = min(AVERAGING, (step + 1) / (step + 10))
        with torch.no_grad():
            for mean, parameter in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 1 - decay)
        if step % 50 == 49:
            losses = " ".join(f"{n} {v:.4f}" for n, v in zip(TASKS, by_task.tolist(), strict=True))
            minutes = (time.monotonic() - started) / 60
            print(f"step {step + 1}/{steps}, {minutes:.1f} min: {losses}", flush=True)
        if step + 1 == round(steps * UNDERTRAINED_AT):
            save(averaged, tokenizer, out / "undertrained")
        if (step + 1) % save_every == 0:
            save(averaged, tokenizer, out / "latest")
    save(averaged, tokenizer, out / "checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3800)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=250, help="steps between snapshots")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.seed, arguments.steps, arguments.out, arguments.save_every)


if __name__ == "__main__":
    main()
