"""Compares complete generations of bundle and reference, with early stop, on the same prompts and noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from canvasrt.demo.tasks import MAX_NEW_TOKENS, TASKS, is_correct
from canvasrt.fidelity.prompts import PromptSet, chats, spread
from canvasrt.fidelity.reference import ReferenceModel
from canvasrt.fidelity.stats import paired_loss, ratio_interval, wilson
from canvasrt.progress import report
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.request import Finished, Request, Result
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer
from canvasrt.types import Json

# The seed of the first generation. The comparison of steps uses seeds from 0.
FIRST_SEED = 1_000
BATCH = 4


# The bundle's result and the reference's result for one request.
Pair = tuple[Result, Result]
SIDES = ("bundle", "reference")


def ask_questions(
    model: Model,
    reference: ReferenceModel,
    tokenizer: Tokenizer,
    questions: int,
) -> tuple[Json, Json]:
    """Ask both sides `questions` held-out questions per demo task. Return `marks` and `pace`."""
    asked = [(task, question) for task in TASKS for question in spread(task, questions)]
    prompts = PromptSet("questions", chats(tokenizer, [question for _, question in asked]))
    pairs = _generate(model, reference, prompts, MAX_NEW_TOKENS)
    right = [
        (
            is_correct(question, tokenizer.decode(ours.token_ids)),
            is_correct(question, tokenizer.decode(theirs.token_ids)),
        )
        for (_, question), (ours, theirs) in zip(asked, pairs, strict=True)
    ]
    tasks = []
    for task in TASKS:
        own = [number for number, (name, _) in enumerate(asked) if name == task]
        found = {"task": task, **marks([right[number] for number in own])}
        tasks.append(found | {"pace": pace([pairs[number] for number in own])})
    return {"all": marks(right), "tasks": tasks}, pace(pairs)


def compare_pace(model: Model, reference: ReferenceModel, prompts: PromptSet) -> Json:
    """Continue every prompt on both sides, up to the checkpoint's default number of tokens. Return the pace."""
    return pace(_generate(model, reference, prompts, None))


def marks(right: Sequence[tuple[bool, bool]]) -> Json:
    """Return each side's share of right answers, from 0 to 1, and the loss, with 95% intervals: Wilson's for each side,
    and a paired interval for the loss.

    right: for each question, whether the bundle's answer is right, and whether the reference's answer is.
    """
    asked = len(right)
    counts = dict(zip(SIDES, map(sum, zip(*right, strict=True)), strict=True))
    lost = sum(theirs and not ours for ours, theirs in right)
    gained = sum(ours and not theirs for ours, theirs in right)
    shares = {
        side: {"right": count, "share": count / asked, "interval": wilson(count, asked)}
        for side, count in counts.items()
    }
    loss = {"loss": (lost - gained) / asked, "loss_interval": paired_loss(lost, gained, asked)}
    return {"asked": asked, **shares, "lost": lost, "gained": gained, **loss}


def pace(pairs: Sequence[Pair]) -> Json:
    """Return both sides' steps per block and tokens per pass, and the relative growth of the steps per block. Tokens
    include end-of-sequence tokens."""
    ours, theirs = zip(*pairs, strict=True)
    steps = [[sum(each.steps) for each in side] for side in (ours, theirs)]
    blocks = [sum(len(each.steps) for each in side) for side in (ours, theirs)]
    tokens = [sum(len(each.token_ids) for each in side) for side in (ours, theirs)]
    totals = [
        {"steps_per_block": sum(taken) / count, "tokens_per_pass": new / sum(taken)}
        for taken, count, new in zip(steps, blocks, tokens, strict=True)
    ]
    # Both sides nearly always generate the same number of blocks; only the steps per block vary.
    low, high = ratio_interval(*steps)
    scale = blocks[1] / blocks[0]
    return {
        "requests": len(pairs),
        **dict(zip(SIDES, totals, strict=True)),
        "steps_growth": totals[0]["steps_per_block"] / totals[1]["steps_per_block"] - 1,
        "steps_growth_interval": [low * scale - 1, high * scale - 1],
    }


def _generate(
    model: Model,
    reference: ReferenceModel,
    prompts: PromptSet,
    max_new_tokens: int | None,
) -> list[Pair]:
    """Return the bundle's and the reference's result for each prompt, under the same noise. If `max_new_tokens` is
    None, the checkpoint's default applies. Both sides generate fewer tokens if the bundle's context has no room for
    more."""
    canvas, longest = reference.config.canvas_length, max(map(len, prompts.tokens))
    room = max(1, (model.max_context - longest) // canvas) * canvas
    requests = [
        Request(
            tokens,
            SamplingParams.from_defaults(
                reference.sampler,
                reference.config,
                seed=FIRST_SEED + number,
                max_new_tokens=min(max_new_tokens or reference.sampler.max_new_tokens, room),
            ),
        )
        for number, tokens in enumerate(prompts.tokens)
    ]
    ours = _run(model, requests, "generating with the bundle")
    theirs = _run(reference, requests, "generating with transformers")
    return list(zip(ours, theirs, strict=True))


def _run(side: Any, requests: Sequence[Request], what: str) -> list[Result]:
    """Return every request's result, in order."""
    generator = Generator(side, side.max_batch or BATCH)
    # Add requests sorted by length, because the reference batches only prompts of equal length.
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_token_ids))
    added = {generator.add(requests[i]): i for i in order}
    results: dict[int, Result] = {}
    while not generator.idle:
        report(what, len(results), len(requests))
        for event in generator.step():
            if isinstance(event, Finished):
                results[added[event.id]] = event.result
    report(what, len(requests), len(requests))
    return [results[i] for i in range(len(requests))]
