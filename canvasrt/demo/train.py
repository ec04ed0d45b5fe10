"""Trains the demo checkpoint and its undertrained twin on a CPU.

python -m canvasrt.demo.train --seed 0 --out DIR

The first phase learns the tasks of `canvasrt.demo.tasks` in about an hour on three cores, and
writes `DIR/first` and `DIR/undertrained`. The second goes on from `DIR/first`, or from `--start`:
known probabilities, closed questions and pictures, with the first tasks mixed in. It writes
`DIR/checkpoint`. Both write `DIR/latest` regularly.

If other programs use the cores too, `OMP_WAIT_POLICY=PASSIVE` is several times faster. The seed, the
numbers of steps and the number of threads determine the weights.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast

from canvasrt.defaults import SOFT_TOKENS
from canvasrt.demo.data import Examples, TrainingBatch
from canvasrt.demo.mixture import MIXTURE_NAMES, Mixture, image_processor
from canvasrt.demo.model import CANVAS_LENGTH, FastForward, add_sight, build_model, sees
from canvasrt.demo.muon import Muon
from canvasrt.demo.tasks import TASKS
from canvasrt.demo.tokenizer import build_tokenizer
from canvasrt.runtime.pictures import BUDGETS

# A few examples have prefixes of whole blocks, and a part of their own.
BATCH_PARTS = (56, 56, 16)
# The second phase: the same tasks, plain chats, closed questions, and pictures in both. A picture of
# the full budget takes four times as long as one of the smallest.
OLD_PARTS, PLAIN_PARTS, CLOSED, PICTURES = (12, 12, 6), 16, 24, (6, 3)
LARGE_PICTURES, LARGE_EVERY = 2, 8
SECOND_RATE = 0.5
SLOT_WEIGHT = 7.0
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


def canvas_for_reads(
    batch: TrainingBatch, canvas: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return the first canvas and its targets, [batch, canvas, vocabulary], for answers whose
    probabilities are known.

    Seven in ten canvases say nothing about the answer, and have its probabilities as their targets:
    all noise, or noise in the slots of a read. The rest have the block itself, as always.
    """
    assert batch.targets is not None
    assert batch.slots is not None
    right = F.one_hot(batch.block, vocab_size).float()
    rows = (len(canvas), 1)
    blank, read = torch.rand(rows) < 0.7, torch.rand(rows) < 0.6
    seen = corrupt(batch.block, ~batch.slots & read, vocab_size)
    targets = torch.where(blank[..., None], batch.targets, right)
    return torch.where(blank, seen, canvas), targets


def loss_of(forward: FastForward, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """Return the training loss, and each example's cross-entropy (detached).

    There are two denoising steps, as in generation: the second is conditioned on the first's
    logits. The cross-entropy is the second's, or the first's where probabilities are known.
    """
    vocab_size = forward.config.vocab_size
    features = None
    if batch.pixels is not None:
        features = forward.see(batch.pixels, batch.places, return_dict=True).pooler_output
    prefix = forward.encode(batch.prefix, batch.padding, features)
    canvas, targets = first_canvas(batch.block, vocab_size), batch.block
    if batch.targets is not None:
        canvas, targets = canvas_for_reads(batch, canvas, vocab_size)
        targets = targets.transpose(1, 2)
    first, first_balance = forward.denoise(canvas, prefix)
    temperature = torch.empty(len(batch.block), 1, 1).uniform_(0.4, 1.0)
    signal = first.detach() / temperature
    second, second_balance = forward.denoise(second_canvas(batch.block, signal), prefix, signal)
    # The filler after the answer counts as much as the answer; otherwise the model does not stop.
    # A read looks at its slots alone, so they count more.
    weight = 1.0 if batch.slots is None else 1 + SLOT_WEIGHT * batch.slots
    entropies = [
        (F.cross_entropy(logits.transpose(1, 2), each, reduction="none") * weight).mean(-1)
        for logits, each in ((first, targets), (second, batch.block))
    ]
    balance = prefix.balance + first_balance + second_balance
    shown = entropies[1] if batch.targets is None else entropies[0]
    return (entropies[0] + entropies[1]).mean() + BALANCE_WEIGHT * balance, shown.detach()


def build_optimizers(model: nn.Module, scale: float = 1.0) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, and AdamW for the rest.

    `scale` multiplies the rates of what was trained before; a new vision tower has the whole rate.
    """
    optimizers: list[torch.optim.Optimizer] = []
    for sight, factor in ((False, scale), (True, 1.0)):
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if ("vision" in name) is sight:
                inner = parameter.ndim == 2 or (parameter.ndim == 3 and "experts" in name)
                inner = inner and "embed" not in name and "router" not in name
                (matrices if inner else rest).append(parameter)
        optimizers += [
            Muon(matrices, lr=MUON_RATE * factor),
            torch.optim.AdamW(rest, lr=ADAM_RATE * factor, betas=(0.9, 0.98), weight_decay=0.0),
        ]
    return optimizers


def rate_factor(step: int, steps: int) -> float:
    """Return the rate: up over the first 100 steps (a tenth, if there are few), level, then down to
    zero over the second half."""
    return min(1.0, (step + 1) / min(100, steps / 10), 2 * (1 - step / steps))


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the Hugging Face layout in bf16 to a temporary folder, then move it into place."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    copy.deepcopy(model).bfloat16().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if sees(model.config):
        image_processor(SOFT_TOKENS).save_pretrained(partial)
    (partial / "model.safetensors").chmod(0o644)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


@dataclass(frozen=True)
class TrainingPhase:
    """One phase: its batches per step, its tasks' names, and how long and fast it learns."""

    batches: Callable[[int], Sequence[TrainingBatch]]
    names: Sequence[str]
    steps: int
    rate: float = 1.0


def train_model(model: Any, plan: TrainingPhase, snapshot: Callable[[int, Any], None]) -> Any:
    """Train a model, and return the running average of its weights.

    `snapshot` gets that average after each step, and its number.
    """
    averaged = copy.deepcopy(model)
    forward = FastForward(model)
    optimizers = build_optimizers(model, plan.rate)
    full = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    by_task: dict[str, float] = {}
    started = time.monotonic()
    for step in range(plan.steps):
        for optimizer, rate in zip(optimizers, full, strict=True):
            optimizer.param_groups[0]["lr"] = rate * rate_factor(step, plan.steps)
            optimizer.zero_grad()
        batches = plan.batches(step)
        total = sum(len(batch.block) for batch in batches)
        for batch in batches:
            loss, entropies = loss_of(forward, batch)
            (loss * len(batch.block) / total).backward()
            for task in batch.tasks.unique():
                now = entropies[batch.tasks == task].mean().item()
                name = (plan.names if batch.targets is None else MIXTURE_NAMES)[task]
                by_task[name] = now if name not in by_task else by_task[name] * 0.98 + now * 0.02
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        decay = min(AVERAGING, (step + 1) / (step + 10))
        with torch.no_grad():
            for mean, parameter in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 1 - decay)
        if step % 50 == 49:
            losses = " ".join(f"{name} {by_task[name]:.4f}" for name in sorted(by_task))
            minutes = (time.monotonic() - started) / 60
            print(f"step {step + 1}/{plan.steps}, {minutes:.1f} min: {losses}", flush=True)
        snapshot(step + 1, averaged)
    return averaged


def train(seed: int, steps: int, out: Path, save_every: int) -> None:
    """Run the first phase: the tasks of `canvasrt.demo.tasks`, from random weights."""
    torch.manual_seed(seed)
    model, tokenizer = build_model(), build_tokenizer()
    examples = Examples(tokenizer, CANVAS_LENGTH, seed)
    out.mkdir(parents=True, exist_ok=True)

    def snapshot(step: int, averaged: Any) -> None:
        if step == round(steps * UNDERTRAINED_AT):
            save(averaged, tokenizer, out / "undertrained")
        if step % save_every == 0:
            save(averaged, tokenizer, out / "latest")

    plan = TrainingPhase(lambda step: examples.batches(BATCH_PARTS), tuple(TASKS), steps)
    save(train_model(model, plan, snapshot), tokenizer, out / "first")


def train_more(seed: int, steps: int, start: Path, out: Path, save_every: int) -> None:
    """Run the second phase from the first's weights: known probabilities, closed questions and
    pictures, with the first phase's tasks mixed in."""
    torch.manual_seed(seed)
    model: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(start, dtype="float32")
    if not sees(model.config):
        model = add_sight(model)
    tokenizer = build_tokenizer()
    old = Examples(tokenizer, CANVAS_LENGTH, seed + 1)
    new = Mixture(tokenizer, CANVAS_LENGTH, seed)
    out.mkdir(parents=True, exist_ok=True)

    def batches(step: int) -> list[TrainingBatch]:
        large = new.pictures(LARGE_PICTURES, 0, SOFT_TOKENS) if step % LARGE_EVERY == 0 else []
        small = new.pictures(*PICTURES, min(BUDGETS))
        return [
            *old.batches(OLD_PARTS),
            *new.plain(PLAIN_PARTS),
            *new.closed(CLOSED),
            *small,
            *large,
        ]

    def snapshot(step: int, averaged: Any) -> None:
        if step % save_every == 0:
            save(averaged, tokenizer, out / "latest")

    plan = TrainingPhase(batches, tuple(TASKS), steps, SECOND_RATE)
    save(train_model(model, plan, snapshot), tokenizer, out / "checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3800, help="of the first phase")
    parser.add_argument("--more-steps", type=int, default=800, help="of the second phase")
    parser.add_argument(
        "--start", type=Path, help="weights of a first phase, which is then left out"
    )
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=250, help="steps between snapshots")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    seed, out, every = arguments.seed, arguments.out, arguments.save_every
    if arguments.start is None:
        train(seed, arguments.steps, out, every)
    train_more(seed, arguments.more_steps, arguments.start or out / "first", out, every)


if __name__ == "__main__":
    main()
