"""Asks held-out questions through stock `transformers` or through engines, and marks the answers.

python -m canvasrt.demo.evaluate [CHECKPOINT] [--engines BUNDLE] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from canvasrt.checkpoints.locate import demo_checkpoint
from canvasrt.demo.reply import MAX_NEW_TOKENS, Reply, Score, score
from canvasrt.demo.tasks import TASKS, is_correct, questions
from canvasrt.demo.tokenizer import chat_prompt


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    batch_size: int = 128,
    **settings: Any,
) -> list[Reply]:
    """Return a stock model's answers in the order of `prompts`.

    `settings` override the checkpoint's sampler settings, for example `max_denoising_steps=1`.
    """
    encoded = [chat_prompt(tokenizer, prompt) for prompt in prompts]
    replies: dict[int, Reply] = {}
    for batch in _batches(encoded, batch_size):
        ids = torch.tensor([encoded[i] for i in batch])
        output = model.generate(input_ids=ids, max_new_tokens=MAX_NEW_TOKENS, **settings)
        new = output.sequences[:, ids.shape[1] :]
        # The output only reports tokens per forward pass, counting tokens that are not padding.
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


def _prompts(task: str, limit: int | None, at_least: int) -> list[str]:
    """Return a task's held-out questions. If there are few, each is asked several times."""
    prompts = questions(task)
    if limit is not None:
        return prompts[:: math.ceil(len(prompts) / limit)]
    return prompts * math.ceil(at_least / len(prompts))


def _print_score(result: Score, replies: Sequence[Reply], wrong: int) -> None:
    print(
        f"{result.task:9} {result.max_steps:2} steps at most: {result.accuracy:6.1%} of"
        f" {result.asked}, {result.steps_per_block:.1f} steps per block",
        flush=True,
    )
    for reply in [r for r in replies if not is_correct(r.prompt, r.text)][:wrong]:
        print(f"    {reply.prompt!r} -> {reply.text!r} ({reply.steps} steps)")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, default=demo_checkpoint())
    parser.add_argument("--engines", type=Path, help="ask this bundle instead of transformers")
    parser.add_argument("--limit", type=int, help="questions per task; default: all")
    parser.add_argument(
        "--at-least", type=int, default=200, help="answers per task, by repeating questions"
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[48, 1], help="step limits to try")
    parser.add_argument("--dtype", default="float32", help="arithmetic; storage is bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wrong", type=int, default=0, help="print up to this many wrong answers")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _asker(arguments: argparse.Namespace) -> Callable[[Sequence[str], int], list[Reply]]:
    """Return what asks prompts under a step limit, through the engines or through transformers."""
    if arguments.engines is not None:
        from canvasrt.demo.engines import answer
        from canvasrt.runtime.open import open_model

        engines = open_model(arguments.engines)
        return lambda prompts, steps: answer(engines, prompts, steps, arguments.seed)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(
        arguments.checkpoint, dtype=arguments.dtype
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    torch.manual_seed(arguments.seed)
    return lambda prompts, steps: generate(model, tokenizer, prompts, max_denoising_steps=steps)


def main() -> None:
    arguments = _parse_arguments()
    ask = _asker(arguments)
    scores = []
    for task in TASKS:
        prompts = _prompts(task, arguments.limit, arguments.at_least)
        for max_steps in arguments.steps:
            replies = ask(prompts, max_steps)
            scores.append(score(task, max_steps, replies))
            if not arguments.json:
                _print_score(scores[-1], replies, arguments.wrong)
    if arguments.json:
        print(json.dumps([asdict(result) for result in scores], indent=2))


if __name__ == "__main__":
    main()
