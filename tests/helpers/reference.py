"""The reference for the runtime's tests: the `generate` of transformers, with canvasrt's noise for random draws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    Gemma4VisionConfig,
)
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
)

from canvasrt.runtime.generator import Generator
from canvasrt.runtime.model import Model
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Request, Result
from canvasrt.runtime.sampling_params import SamplingParams
from canvasrt.runtime.tokenizer import Tokenizer
from tests.helpers import library
from tests.helpers.random_models import BASE

PAD = 0


def inverse_cdf(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first token `[N]` whose cumulative probability exceeds u times the total. The sum has two levels.

    `probabilities` `[N, V]`, `uniforms` `[N]`, float32.
    """
    count, size = probabilities.shape
    rows = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    cells = probabilities.view(count, rows, size // rows)
    tops = cells.sum(-1).cumsum(-1)
    targets = uniforms * tops[:, -1]
    tokens = torch.empty(count, dtype=torch.int64)
    for i in range(count):
        row = int(torch.nonzero(tops[i] > targets[i])[0])
        before = tops[i, row - 1] if row else torch.zeros(())
        inside = cells[i, row].cumsum(-1)
        exceeding = torch.nonzero(inside > targets[i] - before)
        column = int(exceeding[0]) if len(exceeding) else int(torch.nonzero(cells[i, row])[-1])
        tokens[i] = row * (size // rows) + column
    return tokens


def boundary_distance(
    probabilities: torch.Tensor, uniforms: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Return how far each draw is from another token, `[N]`, as a share of the whole mass."""
    sums = probabilities.double().cumsum(-1)
    target = uniforms.double() * sums[:, -1]
    above = sums.gather(1, tokens[:, None])[:, 0]
    below = above - probabilities.gather(1, tokens[:, None])[:, 0].double()
    return torch.minimum(target - below, above - target) / sums[:, -1]


class BiasProcessor(LogitsProcessor):
    """Adds to the logits of some tokens."""

    def __init__(self, bias: Sequence[tuple[int, float]]) -> None:
        self.bias = bias

    def __call__(self, input_ids: object, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, value in self.bias:
            scores[..., token] += value
        return scores


def warpers_of(params: SamplingParams) -> LogitsProcessorList:
    """Return the warpers of transformers for the candidates of a draw, in the order of transformers."""
    warpers: list[LogitsProcessor] = []
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(float(params.top_p)))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return LogitsProcessorList(warpers)


@dataclass
class Trace:
    """A record of the reference's steps: `argmax` and `accepted` by row, block and step, and the closest calls by
    row."""

    argmax: list[list[list[np.ndarray]]] = field(default_factory=list)
    accepted: list[list[list[np.ndarray]]] = field(default_factory=list)
    # How far the closest accepted draw was from another token.
    closest: list[float] = field(default_factory=list)
    # The smallest lead of a router's last chosen expert over the next expert.
    ahead: list[float] = field(default_factory=list)

    def steps(self, row: int) -> list[int]:
        return [len(block) for block in self.argmax[row]]


@dataclass
class ReferenceOutput:
    """Token ids per row, including the end of sequence, and the trace."""

    tokens: list[list[int]]
    trace: Trace

    def check(self, results: Sequence[Result]) -> None:
        """Check that `results` have the same tokens and steps, row by row.

        Both sides round. A draw closer than about 1e-6 to another token's share may therefore differ, and so may the
        choice between two experts. With such a seed, a failure proves nothing, so the message gives the smallest
        distances.
        """
        assert len(results) == len(self.tokens)
        for row, result in enumerate(results):
            where = (
                f"row {row}; the closest draw was {self.trace.closest[row]:.1e} from another token, "
                f"the closest expert {self.trace.ahead[row]:.1e} ahead of another"
            )
            assert result.token_ids == self.tokens[row], where
            assert result.steps == self.trace.steps(row), where


class Reference:
    """The model and `generate` of transformers, with canvasrt's noise instead of random draws."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion) -> None:
        self.model = model.eval()
        self.canvas = self._own = model.config.canvas_length
        self.vocab = model.config.text_config.vocab_size
        self.processors: list[LogitsProcessor] = []  # applied before the temperature

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **inputs: Any
    ) -> ReferenceOutput:
        """Generate from prompts of the same length as one batch. `params` differ only in their seeds.

        `inputs` are the processor's outputs for images.
        """
        first = params[0]
        # The weights stay the same; only the canvas length in the configuration changes.
        self.canvas = first.canvas_length or self._own
        config = DiffusionGemmaGenerationConfig(
            max_new_tokens=first.max_new_tokens,
            max_denoising_steps=first.max_denoising_steps,
            sampler_config=EntropyBoundSamplerConfig(entropy_bound=first.entropy_bound),
            t_min=first.t_min,
            t_max=first.t_max,
            stability_threshold=first.stability_threshold,
            confidence_threshold=first.confidence_threshold,
            eos_token_id=list(first.eos_token_ids) or None,
            pad_token_id=PAD,
        )
        seeds = [each.seed for each in params]
        bias = [BiasProcessor(first.logit_bias)] if first.logit_bias else []
        with self._patched(seeds, first.early_stop, warpers_of(first)) as trace:
            output = self.model.generate(
                torch.tensor(prompts),
                generation_config=config,
                logits_processor=LogitsProcessorList([*bias, *self.processors]),
                **inputs,
            )
        new = output.sequences[:, len(prompts[0]) :].tolist()
        tokens = []
        for row, ids in enumerate(new):
            ids, blocks = self._cut(ids, first)
            tokens.append(ids)
            # After a row's end of sequence, blocks run only for other rows of the batch.
            del trace.argmax[row][blocks:], trace.accepted[row][blocks:]
        return ReferenceOutput(tokens, trace)

    def _cut(self, ids: list[int], params: SamplingParams) -> tuple[list[int], int]:
        for index, token in enumerate(ids):
            if token in params.eos_token_ids:
                assert all(after == PAD for after in ids[index + 1 :])
                return ids[: min(index + 1, params.max_new_tokens)], index // self.canvas + 1
        return ids[: params.max_new_tokens], len(ids) // self.canvas

    @contextmanager
    def _patched(
        self, seeds: list[int], early_stop: bool, warpers: LogitsProcessorList
    ) -> Iterator[Trace]:
        trace = Trace(
            [[] for _ in seeds], [[] for _ in seeds], [1.0 for _ in seeds], [1.0 for _ in seeds]
        )
        distance = torch.ones(len(seeds), self.canvas)
        at = {"block": -1, "step": 0}
        kind = type(self.model)
        prepare, denoise = kind._prepare_denoiser_inputs, kind._denoising_step
        noise, choose = self._noise, torch.topk

        def new_block(self: Any, *args: Any, **kwargs: Any) -> Any:
            at.update(block=at["block"] + 1, step=0)
            for row in range(len(seeds)):
                trace.argmax[row].append([])
                trace.accepted[row].append([])
            return prepare(self, *args, **kwargs)

        def multinomial(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
            at["step"] += 1
            uniforms = torch.from_numpy(noise(seeds, at["block"], at["step"])[0]).reshape(-1)
            if warpers:
                probabilities = warpers(None, probabilities.log()).softmax(-1)
            tokens = inverse_cdf(probabilities, uniforms)
            distance[:] = boundary_distance(probabilities, uniforms, tokens).view_as(distance)
            return tokens[:, None]

        def topk(x: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
            if x.shape[-1] == self.model.config.text_config.num_experts > k:
                best = choose(x, k + 1, dim=-1).values
                ahead = (best[..., -2] - best[..., -1]).reshape(len(seeds), -1).amin(1).tolist()
                trace.ahead = [min(pair) for pair in zip(trace.ahead, ahead, strict=True)]
            return choose(x, k, *args, **kwargs)

        def uniform_canvas(self: Any, batch_size: int, device: torch.device) -> torch.Tensor:
            return torch.from_numpy(noise(seeds, at["block"], at["step"])[1])

        def denoising_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            done = kwargs["finished_denoising"].clone()
            result = denoise(self, *args, **kwargs)
            for row in torch.nonzero(~done).flatten().tolist():
                trace.argmax[row][-1].append(result[1][row].numpy())
                accepted = kwargs["sampler"].accepted_token_mask[row]
                trace.accepted[row][-1].append(accepted.numpy())
                near = distance[row][accepted].tolist()
                trace.closest[row] = min(trace.closest[row], *near, 1.0)
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.model.config, "canvas_length", self.canvas)
            patch.setattr(kind, "_prepare_denoiser_inputs", new_block)
            patch.setattr(kind, "_denoising_step", denoising_step)
            patch.setattr(EntropyBoundSampler, "initialize_canvas", uniform_canvas)
            patch.setattr(torch, "multinomial", multinomial)
            patch.setattr(torch, "topk", topk)
            if not early_stop:
                patch.setattr(kind, "_prepare_diffusion_stopping_criteria", lambda *_: None)
            yield trace

    def _noise(self, seeds: list[int], block: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        rows = [step_noise(seed, block, step, self.canvas, self.vocab) for seed in seeds]
        return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])


def tiny_model(seed: int = 0) -> DiffusionGemmaForBlockDiffusion:
    """Return a random model with every kind of layer, scaled so that it prefers some tokens and changes its choice
    between steps.

    Because of the large table, each token is its own likeliest successor. Because of the damped branches, canvases
    settle after some steps. So acceptance and early stop differ from block to block.
    """
    vision = Gemma4VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
    )
    config = DiffusionGemmaConfig(
        text_config=DiffusionGemmaTextConfig(**BASE),
        vision_config=vision,
        canvas_length=32,
        boi_token_id=509,
        image_token_id=510,
        eoi_token_id=511,
    )
    model = DiffusionGemmaForBlockDiffusion(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                scale = 3.0 if "embed_tokens" in name else 1.0
                parameter.copy_(values * scale * parameter.shape[-1] ** -0.5)
            elif "q_norm" in name:
                # Attention does not divide by sqrt(head_dim), so this does. Larger weights would amplify rounding.
                parameter.copy_((1 + 0.2 * values) * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(1 + 0.2 * values)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.7 + 0.6 * torch.rand(buffer.shape, generator=generator))
    return model


@dataclass
class Pair:
    """A checkpoint opened twice: as the reference in torch, and as canvasrt's model."""

    checkpoint: Path
    graphs: Path
    bundle: Path
    reference: Reference
    model: Model

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.model.bundle is not None
        return Tokenizer.load(self.model.bundle)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], max_batch: int = 4
    ) -> list[Result]:
        requests = [Request(*each) for each in zip(prompts, params, strict=True)]
        return Generator(self.model, max_batch).run(requests)


def make_pair(name: str, layers_per_segment: int | None = None) -> Pair:
    """Load both sides for a model of tests/helpers/library.py. Each uses one thread."""
    checkpoint = library.checkpoint(name)
    graphs = library.graphs(name, layers_per_segment=layers_per_segment)
    engines = library.bundle(graphs)
    torch.set_num_threads(1)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(checkpoint, dtype=torch.float32)
    loaded = open_model(engines, threads=1)
    return Pair(checkpoint, graphs, engines, Reference(model), loaded)
