"""Asks the demo's held-out questions of stock `transformers` and of engines, under several settings.

With `--settings` or `--scores`, consecutive questions come from different tasks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from bench import results
from canvasrt.checkpoints.locate import find_checkpoint
from canvasrt.demo.tasks import MAX_NEW_TOKENS, TASKS, is_correct, questions
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Block, Draft, Finished, Request, Settled
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer
from canvasrt.types import Json

REDONE = 0.25  # the share of blocks to redo: the blocks with the lowest scores


@dataclass(frozen=True)
class Reply:
    """One answer: its text, and the denoising steps and blocks that it took."""

    prompt: str
    text: str
    steps: int
    blocks: int


def measure(
    engines: Path,
    checkpoint: Annotated[str, typer.Option(help="The checkpoint for transformers.")] = "demo",
    at_least: Annotated[
        int, typer.Option(help="The fewest answers per task; questions repeat to reach it.")
    ] = 200,
    settings: Annotated[
        int | None, typer.Option(metavar="N", help="Compare settings on N questions instead.")
    ] = None,
    scores: Annotated[
        int | None, typer.Option(metavar="N", help="Score the answers to N questions instead.")
    ] = None,
    out: results.Out = None,
) -> None:
    """Count exactly right answers from transformers, from engines, and from engines with one denoising step."""
    model = open_model(engines, threads=1)
    if settings is not None:
        results.report({"settings": list(_settings(Asker(model, settings)))}, out)
        return
    if scores is not None:
        results.report({"scores": list(_scores(Asker(model, scores)))}, out)
        return
    stock = _stock(find_checkpoint(checkpoint))
    rows = []
    for task in TASKS:
        held_out = questions(task)
        prompts = held_out * math.ceil(at_least / len(held_out))
        whole = answer(model, prompts)
        rows.append(
            {
                "task": task,
                "asked": len(prompts),
                "transformers": _right(generate(*stock, prompts)),
                "engines": _right(whole),
                "steps per block": sum(each.steps for each in whole)
                / sum(each.blocks for each in whole),
                "engines, one step": _right(answer(model, prompts, max_denoising_steps=1)),
            }
        )
    results.report({"right": rows}, out)


def _right(replies: Sequence[Reply]) -> float:
    return sum(is_correct(each.prompt, each.text) for each in replies) / len(replies)


def _stock(checkpoint: Path) -> tuple[Any, Any]:
    """Return transformers' model and tokenizer."""
    import torch
    from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

    torch.manual_seed(0)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(checkpoint, dtype="float32").eval()
    return model, AutoTokenizer.from_pretrained(checkpoint)


def answer(model: Model, prompts: Sequence[str], **settings: Any) -> list[Reply]:
    """Return a loaded bundle's answers in the order of `prompts`. Question i uses seed i."""
    tokenizer = _tokenizer(model)
    requests = [
        _request(model, tokenizer, prompt, seed, **settings) for seed, prompt in enumerate(prompts)
    ]
    return [
        Reply(prompt, tokenizer.decode(result.token_ids), sum(result.steps), len(result.steps))
        for prompt, result in zip(prompts, Generator(model).run(requests), strict=True)
    ]


def _tokenizer(model: Model) -> Tokenizer:
    assert model.bundle is not None
    return Tokenizer.load(model.bundle)


def _request(
    model: Model, tokenizer: Tokenizer, prompt: str, seed: int, **settings: Any
) -> Request:
    params = SamplingParams.from_defaults(
        model.sampler, model.config, seed=seed, max_new_tokens=MAX_NEW_TOKENS, **settings
    )
    return Request(tokenizer.encode_chat([{"role": "user", "content": prompt}]), params)


def generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], batch_size: int = 128, **settings: Any
) -> list[Reply]:
    """Return a stock model's answers in the order of `prompts`.

    `settings` override the checkpoint's sampler settings, for example `max_denoising_steps=1`.
    """
    import torch

    from bench.demo.tokenizer import chat_prompt

    encoded = [chat_prompt(tokenizer, prompt) for prompt in prompts]
    replies: dict[int, Reply] = {}
    for batch in _batches(encoded, batch_size):
        ids = torch.tensor([encoded[i] for i in batch])
        output = model.generate(input_ids=ids, max_new_tokens=MAX_NEW_TOKENS, **settings)
        new = output.sequences[:, ids.shape[1] :]
        # The output has no number of steps, only tokens per forward pass, which exclude padding.
        valid = (new != model.generation_config.pad_token_id).sum(-1)
        steps = (valid / output.tokens_per_forward).round().nan_to_num(1).int().tolist()
        for row, i in enumerate(batch):
            text = tokenizer.decode(new[row], skip_special_tokens=True)
            blocks = max(1, math.ceil(valid[row].item() / model.config.canvas_length))
            replies[i] = Reply(prompts[i], text, steps[row], blocks)
    return [replies[i] for i in range(len(prompts))]


def _batches(encoded: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Yield indices of prompts of the same length, so that no prompt needs padding."""
    by_length = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    for _, same in groupby(by_length, key=lambda i: len(encoded[i])):
        indices = list(same)
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


class Asker:
    """Asks a bundle the same held-out questions with the same seeds for every setting."""

    def __init__(self, model: Model, count: int) -> None:
        rng = random.Random(0)
        names = list(TASKS)
        self.prompts = [
            TASKS[names[i % len(names)]].draw_from("held-out", rng) for i in range(count)
        ]
        self.model, self._tokenizer = model, _tokenizer(model)

    def ask(self, settings: dict[str, Any]) -> tuple[Json, np.ndarray]:
        """Return the figures for these settings, and the score of each answer's first block if blocks are scored."""
        texts, scores, steps, first = [], [], 0, 0
        for seed, prompt in enumerate(self.prompts):
            drafts = shown = 0
            request = _request(self.model, self._tokenizer, prompt, seed, **settings)
            for event in Generator(self.model).stream(request):
                if isinstance(event, Draft):
                    drafts += 1
                elif isinstance(event, Settled | Block):
                    shown = shown or drafts
                elif isinstance(event, Finished):
                    texts.append(self._tokenizer.decode(event.result.token_ids))
                    scores += [each.score for each in event.result.block_scores[:1]]
                    steps += sum(event.result.steps)
            first += shown
        count, canvas = len(texts), settings.get("canvas_length", self.model.canvas_length)
        right = np.array([is_correct(*pair) for pair in zip(self.prompts, texts, strict=True)])
        row = {
            "right": int(right.sum()),
            "steps": steps / count,
            "steps to first text": first / count,
            "positions computed": canvas * steps / count,
        }
        found = np.array(scores)
        if scores and right.any() and not right.all():
            above = found[right][:, None] - found[~right][None]
            row["right scores above wrong"] = float(((above > 0) + 0.5 * (above == 0)).mean())
        return row, found


def _settings(asker: Asker) -> Iterator[Json]:
    """Yield the effects of smaller canvases and of showing text earlier."""
    model = asker.model
    sizes = [size for size in model.canvas_sizes if size != model.canvas_length]
    tried: dict[str, dict[str, Any]] = {"as it is": {}}
    tried |= {f"`canvas_length` {size}": {"canvas_length": size} for size in sizes}
    tried |= {f"`settle_steps` {wait}": {"settle_steps": wait} for wait in (1, 2, 3)}
    for name, settings in tried.items():
        row, _ = asker.ask(settings)
        yield {"setting": name, **row}


def _scores(asker: Asker) -> Iterator[Json]:
    """Yield how well each kind of score separates right answers from wrong ones, and what redoing the lowest-scored
    blocks changes."""
    plain, _ = asker.ask({})
    for name, key in (
        ("the encoding pass", "score_blocks"),
        ("a denoising pass", "score_by_denoising"),
    ):
        settings = {"score_blocks": True, key: True}
        row, scores = asker.ask(settings)
        bar = float(f"{min(np.quantile(scores, REDONE), -1e-9):.2g}")
        redone, _ = asker.ask(settings | {"redo_below": bar})
        yield {
            "score by": name,
            "right answers score higher": row.get("right scores above wrong"),
            "right": plain["right"],
            "`redo_below`": bar,
            "right after redoing": redone["right"],
            "steps": plain["steps"],
            "steps with redoing": redone["steps"],
        }
