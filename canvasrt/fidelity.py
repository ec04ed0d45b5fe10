"""How far a bundle's denoising steps are from transformers' on the checkpoint that it was made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from canvasrt.errors import CanvasError
from canvasrt.extras import require
from canvasrt.model import ModelConfig
from canvasrt.progress import Progress, no_progress
from canvasrt.runtime.model import DenoiseInput, EncodeInput, Model, Row
from canvasrt.runtime.noise import step_noise

PROMPTS = 4
STEPS = 12
# Of fp32 graphs; differences come from the order of sums alone.
MIN_AGREEMENT = 0.999
MAX_ENTROPY_ERROR = 1e-3


@dataclass(frozen=True)
class Fidelity:
    """What was compared: every position of every step, both sides fed the bundle's own canvases.

    `argmax_agreement` is the share of positions with the same best token; the entropy errors are absolute, in nats.
    """

    prompts: int
    steps: int
    positions: int
    argmax_agreement: float
    entropy_error_mean: float
    entropy_error_max: float

    @property
    def ok(self) -> bool:
        """Whether the bundle says what its checkpoint says, as nearly as fp32 can."""
        near = self.entropy_error_mean <= MAX_ENTROPY_ERROR
        return near and self.argmax_agreement >= MIN_AGREEMENT

    def to_json(self) -> dict[str, Any]:
        """The numbers, their limits and the verdict."""
        limits = {"argmax_agreement": MIN_AGREEMENT, "entropy_error_mean": MAX_ENTROPY_ERROR}
        return {**asdict(self), "limits": limits, "ok": self.ok}


def measure(bundle: Path, checkpoint: Path, progress: Progress | None = None) -> Fidelity:
    """Denoise one block behind random prompts, step by step, through the bundle and through transformers.

    Raises CanvasError when the bundle cannot run here, and when the checkpoint is of another shape.
    """
    report = progress or no_progress
    require("torch", "export")
    require("transformers", "test")
    config, _ = ModelConfig.from_checkpoint(checkpoint)
    model = Model.load(bundle, check=False)
    if config != model.config:
        raise CanvasError(
            f"{checkpoint} and {bundle} are of different shapes",
            "give the checkpoint that the bundle was made from",
        )
    reference = _Reference(checkpoint)
    same, errors = [], []
    for seed in range(PROMPTS):
        report("comparing with transformers", seed, PROMPTS)
        for argmax, entropy, expected_argmax, expected_entropy in _steps(model, reference, seed):
            same.append(argmax == expected_argmax)
            errors.append(np.abs(entropy - expected_entropy))
    report("comparing with transformers", PROMPTS, PROMPTS)
    return Fidelity(
        prompts=PROMPTS,
        steps=STEPS,
        positions=sum(each.size for each in same),
        argmax_agreement=float(np.mean(same)),
        entropy_error_mean=float(np.mean(errors)),
        entropy_error_max=float(np.max(errors)),
    )


def _steps(model: Model, reference: _Reference, seed: int) -> Any:
    """Argmax and entropy `[canvas]` of each step: the bundle's, then the reference's."""
    config, canvas_length = model.config, model.canvas_length
    random = np.random.default_rng(seed)
    # Short ones and ones that the sliding window cuts off.
    longest = min(config.sliding_window + 8, model.max_context - canvas_length)
    prompt = random.integers(0, config.vocab_size, longest if seed % 2 else min(8, longest))
    row = model.new_row()
    _encode(model, row, prompt)
    reference.encode(prompt)
    sampler = model.sampler
    canvas = step_noise(seed, 0, 0, canvas_length, config.vocab_size)[1]
    hidden = model.first_hidden(canvas)
    for step in range(1, STEPS + 1):
        remaining = (STEPS + 1 - step) / STEPS
        temperature = sampler.t_min + (sampler.t_max - sampler.t_min) * remaining
        uniforms, noise = step_noise(seed, 0, step, canvas_length, config.vocab_size)
        given = DenoiseInput(
            row, hidden, np.float32(temperature), sampler.entropy_bound, uniforms, noise
        )
        (out,) = model.denoise([given])
        yield out.argmax, out.entropy, *reference.denoise(canvas, temperature)
        canvas, hidden = out.canvas, out.next_hidden


def _encode(model: Model, row: Row, tokens: np.ndarray) -> None:
    for start in range(0, len(tokens), model.prefill_chunk):
        model.encode([EncodeInput(row, tokens[start : start + model.prefill_chunk])])


class _Reference:
    """transformers' model in fp32: one prompt at a time, then steps over canvases that it is given."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._torch, self._new_cache = torch, DynamicCache
        self._model = DiffusionGemmaForBlockDiffusion.from_pretrained(
            checkpoint, dtype=torch.float32
        ).eval()

    def encode(self, prompt: np.ndarray) -> None:
        """Start over with this prompt in the cache."""
        self._cache = self._new_cache(config=self._model.config.get_text_config(decoder=True))
        self._signal: Any = None
        with self._torch.no_grad():
            self._model.model.encoder(
                input_ids=self._torch.from_numpy(prompt)[None], past_key_values=self._cache
            )

    def denoise(self, canvas: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """Argmax and entropy `[canvas]` of one step, self-conditioned on the step before."""
        with self._torch.no_grad():
            logits = self._model(
                decoder_input_ids=self._torch.from_numpy(np.ascontiguousarray(canvas))[None],
                past_key_values=self._cache,
                self_conditioning_logits=self._signal,
                decoder_position_ids=self._positions(len(canvas)),
            ).logits
        self._signal = logits / temperature
        entropy = self._torch.distributions.Categorical(logits=self._signal).entropy()
        return logits[0].argmax(-1).numpy(), entropy[0].numpy()

    def _positions(self, count: int) -> Any:
        start = self._cache.get_seq_length()
        return self._torch.arange(start, start + count)[None]
