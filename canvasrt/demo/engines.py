"""Asks a bundle the demo's questions through canvasrt's own engines."""

from __future__ import annotations

from collections.abc import Sequence

from canvasrt.demo.reply import MAX_NEW_TOKENS, Reply
from canvasrt.runtime.generator import Generator, Request
from canvasrt.runtime.model import Model
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer


def answer(
    model: Model, prompts: Sequence[str], max_denoising_steps: int | None = None, seed: int = 0
) -> list[Reply]:
    """Return a loaded bundle's answers in the order of `prompts`. Question i uses seed `seed + i`.

    If `max_denoising_steps` is None, the checkpoint's own applies.
    """
    assert model.bundle is not None
    tokenizer = Tokenizer.load(model.bundle)
    requests = [
        Request(
            tokenizer.encode_chat([{"role": "user", "content": prompt}]),
            SamplingParams.from_defaults(
                model.sampler,
                model.config,
                seed=seed + index,
                max_new_tokens=MAX_NEW_TOKENS,
                max_denoising_steps=max_denoising_steps,
            ),
        )
        for index, prompt in enumerate(prompts)
    ]
    results = Generator(model).run(requests)
    return [
        Reply(prompt, tokenizer.decode(result.token_ids), sum(result.steps), len(result.steps))
        for prompt, result in zip(prompts, results, strict=True)
    ]
