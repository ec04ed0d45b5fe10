"""The reference for canvases with restricted tokens: denoising steps of transformers with canvasrt's noise, in which
tokens that are not allowed have logits of minus infinity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.generation import LogitsProcessor, LogitsProcessorList
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
)

from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.reference import Reference, inverse_cdf

Noise = Callable[[int], tuple[np.ndarray, np.ndarray]]  # step → uniforms and tokens


@dataclass
class ToldStep:
    """The raw logits of a step, `[canvas, V]`, and the results of the sampler, `[canvas]`."""

    logits: np.ndarray
    argmax: np.ndarray
    accepted: np.ndarray
    canvas: np.ndarray


class _Only(LogitsProcessor):
    """Masks tokens that are not allowed at their position, and keeps the raw logits."""

    def __init__(self, mask: np.ndarray) -> None:
        self.mask, self.raw = torch.from_numpy(mask), torch.empty(0)

    def __call__(self, input_ids: object, scores: torch.Tensor) -> torch.Tensor:
        self.raw = scores[0].clone()
        return scores.masked_fill(~self.mask[None], float("-inf"))


def cache_of(
    reference: Reference, prompt: Sequence[int], images: Mapping[str, torch.Tensor] | None = None
) -> DynamicCache:
    """Encode a prompt; return its cache. `images` are the outputs of transformers' processor."""
    model = reference.model
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.tensor([list(prompt)])
    seen: dict[str, object] = {}
    if images is not None:
        seen = {
            "pixel_values": images["pixel_values"].float(),
            "image_position_ids": images["image_position_ids"],
            "attention_mask": model.model.encoder.create_masks_for_generate(
                config=model.config,
                inputs_embeds=torch.empty(*ids.shape, 0),
                attention_mask=None,
                past_key_values=cache,
                position_ids=torch.arange(len(prompt))[None],
                mm_token_type_ids=(ids == model.config.image_token_id).long(),
            ),
        }
    with torch.no_grad():
        model.model.encoder(
            input_ids=ids,
            past_key_values=cache,
            position_ids=torch.arange(len(prompt))[None],
            **seen,
        )
    return cache


def restricted_steps(
    reference: Reference,
    cache: DynamicCache,
    begin: int,
    canvas: Sequence[int],
    allowed: Mapping[int, Sequence[int]],
    params: SamplingParams,
    noise: Noise,
    count: int,
) -> list[ToldStep]:
    """Run `count` denoising steps of transformers from `canvas`, whose first position is `begin`."""
    model, length = reference.model, len(canvas)
    mask = np.ones((length, reference.vocab), bool)
    for position, tokens in allowed.items():
        mask[position] = np.isin(np.arange(reference.vocab), list(tokens))
    only = _Only(mask)
    heat = LinearTemperatureScheduleLogitsProcessor(
        params.t_min, params.t_max, params.max_denoising_steps
    )
    sampler = EntropyBoundSampler(
        EntropyBoundSamplerConfig(entropy_bound=params.entropy_bound),
        length,
        reference.vocab,
        params.max_denoising_steps,
    )
    done, signal, step = [], None, 0

    def multinomial(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        return inverse_cdf(probabilities, torch.from_numpy(noise(step)[0]))[:, None]

    def fresh(self: object, batch_size: int, device: object) -> torch.Tensor:
        return torch.from_numpy(noise(step)[1])[None]

    now = torch.tensor([list(canvas)])
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "multinomial", multinomial)
        patch.setattr(EntropyBoundSampler, "initialize_canvas", fresh)
        for step in range(1, count + 1):
            now, argmax, signal, _ = model._denoising_step(
                decoder_forward=model,
                current_canvas=now,
                argmax_canvas=now,
                input_ids=now,
                decoder_position_ids=torch.arange(begin, begin + length)[None],
                self_conditioning_logits=signal,
                mask_mapping=None,
                past_key_values=cache,
                finished_denoising=torch.zeros(1, dtype=torch.bool),
                cur_step=params.max_denoising_steps - step + 1,
                sampler=sampler,
                logits_processor=LogitsProcessorList([only, heat]),
                diffusion_stopping_criteria=None,
            )
            done.append(
                ToldStep(
                    only.raw.numpy(),
                    argmax[0].numpy(),
                    sampler.accepted_token_mask[0].numpy(),
                    now[0].numpy(),
                )
            )
    return done
