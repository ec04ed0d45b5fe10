"""Trains the bundled demo checkpoints and their undertrained twin on a CPU.

The first phase learns the tasks of `canvasrt.demo.tasks` in about an hour on three cores: `demo`. The second continues
in several runs with known probabilities, closed questions and pictures, mixed with the first tasks: `demo-vision`.

If other programs use the cores too, `OMP_WAIT_POLICY=PASSIVE` makes training several times faster. The seed, the number
of steps and the number of threads determine the weights. The committed `demo-vision` cannot be reproduced bit for bit:
its first run used a longer preamble for closed questions, and pictures of up to five dots.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast

from bench.demo.data import TASK_WEIGHTS, Examples, TrainingBatch
from bench.demo.mixture import MIXTURE_NAMES, Mixture, image_processor
from bench.demo.model import CANVAS_LENGTH, FastForward, add_sight, build_model, sees
from bench.demo.muon import Muon
from bench.demo.tokenizer import build_tokenizer
from canvasrt.defaults import SOFT_TOKENS
from canvasrt.demo.tasks import TASKS
from canvasrt.runtime.pictures import BUDGETS

# Sizes of a batch's parts. The few examples with the longest prefixes (earlier blocks) form the last part.
BATCH_PARTS = (56, 56, 16)
# Large pictures are rare, since one with the full budget of soft tokens takes four times as long as a small one.
LARGE_PICTURES, LARGE_EVERY = 2, 8
SLOT_WEIGHT = 7.0
MUON_RATE, ADAM_RATE = 0.02, 3e-3
AVERAGING = 0.998
BALANCE_WEIGHT = 0.01
UNDERTRAINED_AT = 0.4  # share of all steps


def corrupt(block: Tensor, keep: Tensor, vocab_size: int) -> Tensor:
    """Put uniform noise wherever `keep` is False: there is no mask token."""
    return torch.where(keep, block, torch.randint_like(block, vocab_size))


def first_canvas(block: Tensor, vocab_size: int) -> Tensor:
    """Return a canvas for the first pass: often all noise, as in a first step; otherwise with a random share of
    noise."""
    level = torch.rand(len(block), 1)
    level = torch.where(torch.rand(len(block), 1) < 0.35, 1.0, level)
    return corrupt(block, torch.rand(block.shape) >= level, vocab_size)


def second_canvas(block: Tensor, logits: Tensor) -> Tensor:
    """Return a canvas as the sampler might leave it after a step with these logits.

    Most examples keep the right tokens at the positions that an entropy bound accepts. Bounds start at the released
    0.1. The other examples keep random positions. In some canvases, part of the noise is drawn from the logits.
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

    Seven in ten canvases are all noise, or have noise in the slots of a read. Such a canvas says nothing about the
    answer, so its targets are the answers' probabilities. For other canvases, the target is the block itself.
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

    There are two denoising steps, as in generation: the second is conditioned on the first's logits. The cross-entropy
    is taken at the second step, or at the first if probabilities are known.
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
    # The padding after an answer counts as much as the answer; otherwise the model does not stop. A closed question is
    # answered from its slots alone, so slots count more.
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

    `scale` multiplies the learning rates of all weights except the vision tower's.
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
    """Return the factor of the learning rate: it rises over the first 100 steps (at most a tenth of all), stays at 1,
    and falls to zero over the second half."""
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
    """One phase: the batches of each step, the tasks' names, the number of steps and the learning rate."""

    batches: Callable[[int], Sequence[TrainingBatch]]
    names: Sequence[str]
    steps: int
    rate: float = 1.0
    stop: int | None = None  # the step to stop after; the learning rate still follows `steps`


def train_model(model: Any, plan: TrainingPhase, snapshot: Callable[[int, Any], None]) -> Any:
    """Train a model, and return the running average of its weights.

    After each step, `snapshot` gets the step's number and the average.
    """
    averaged = copy.deepcopy(model)
    forward = FastForward(model)
    optimizers = build_optimizers(model, plan.rate)
    full = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    by_task: dict[str, float] = {}
    started = time.monotonic()
    for step in range(plan.stop or plan.steps):
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
    """Run the first phase, from random weights."""
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
    save(train_model(model, plan, snapshot), tokenizer, out / "checkpoint")


@dataclass(frozen=True)
class VisionRun:
    """A run of the second phase: its length, and how many examples of each kind a step has.

    old: sizes of the parts with tasks of the first phase. plain and closed: examples with known probabilities, asked as
    chats and as closed questions. pictures: chats and closed questions about pictures of the smallest budget.
    """

    seed: int
    steps: int
    stop: int | None = None
    threads: int = 2
    old: tuple[int, ...] = (12, 12, 6)
    plain: int = 16
    closed: int = 24
    pictures: tuple[int, int] = (6, 3)
    rate: float = 0.5
    weights: Mapping[str, float] = field(default_factory=lambda: TASK_WEIGHTS)


# The last run trains again on tasks that the model forgot in the earlier runs.
VISION_RUNS = (
    VisionRun(seed=0, steps=800, stop=300, threads=3),
    VisionRun(seed=0, steps=420, threads=3),
    VisionRun(seed=7, steps=1300, stop=500),
    VisionRun(seed=8, steps=420),
    VisionRun(
        seed=11,
        steps=420,
        old=(28, 28, 12),
        plain=12,
        closed=20,
        pictures=(6, 4),
        rate=0.22,
        weights=TASK_WEIGHTS | {"shuffle": 4.5, "sort": 1.4, "brackets": 3.5},
    ),
)


def train_more(run: VisionRun, start: Path, out: Path) -> None:
    """Run a part of the second phase: load the weights in `start`, train, and write the result to `out`."""
    torch.manual_seed(run.seed)
    model: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(start, dtype="float32")
    if not sees(model.config):
        model = add_sight(model)
    tokenizer = build_tokenizer()
    old = Examples(tokenizer, CANVAS_LENGTH, run.seed + 1, run.weights)
    new = Mixture(tokenizer, CANVAS_LENGTH, run.seed)

    def batches(step: int) -> list[TrainingBatch]:
        large = new.pictures(LARGE_PICTURES, 0, SOFT_TOKENS) if step % LARGE_EVERY == 0 else []
        small = new.pictures(*run.pictures, min(BUDGETS))
        return [
            *old.batches(run.old),
            *new.plain(run.plain),
            *new.closed(run.closed),
            *small,
            *large,
        ]

    plan = TrainingPhase(batches, tuple(TASKS), run.steps, run.rate, run.stop)
    save(train_model(model, plan, lambda step, averaged: None), tokenizer, out)


def measure(
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write.")],
    seed: Annotated[int, typer.Option(help="The seed of the first phase.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps of the first phase.")] = 3800,
    start: Annotated[
        Path | None, typer.Option(help="Weights of a first phase, which is then skipped.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of the first phase.")] = 3,
    save_every: Annotated[int, typer.Option(help="Steps between snapshots.")] = 250,
) -> None:
    """Train both checkpoints: OUT/checkpoint, OUT/undertrained and OUT/checkpoint-vision."""
    torch.set_num_threads(threads)
    if start is None:
        train(seed, steps, out, save_every)
        start = out / "checkpoint"
    for run in VISION_RUNS:
        torch.set_num_threads(run.threads)
        train_more(run, start, out / "checkpoint-vision")
        start = out / "checkpoint-vision"
