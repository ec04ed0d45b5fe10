"""transformers' model in fp32, run by our own generator with a bundle's noise, sampler and early stop.

Only the network differs, so generations can be compared question by question.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from canvasrt.checkpoints.description import Description
from canvasrt.errors import CanvasError
from canvasrt.extras import require
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, EncodeInput

if TYPE_CHECKING:
    from torch import Tensor

REFERENCE_EXTRA = "export,test"
MAX_REFERENCE_BATCH = 32
MAX_LOGITS = 1 << 26


@dataclass
class ReferenceRow:
    """One request's cache, and the logits of its last step."""

    cache: Any
    length: int = 0
    logits: Tensor | None = None  # [canvas, V], soft-capped, before the temperature
    temperature: float = 1.0
    canvas: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


class ReferenceModel:
    """A model for `canvasrt.runtime.generator` whose network is computed by transformers.

    Where other models pass hidden states from step to step, this one passes the canvas, int64 `[canvas]`.
    """

    # The most passes in one turn of a request. There is no limit, so that no request is parked.
    quantum = sys.maxsize
    chunk_steps = 1

    def __init__(self, checkpoint: Description, streamed: bool = False) -> None:
        """Load a checkpoint. If `streamed` is true, each layer is loaded only when it runs."""
        require("torch", REFERENCE_EXTRA)
        require("transformers", REFERENCE_EXTRA)
        import torch
        from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.config, self.sampler = checkpoint.model, checkpoint.sampler
        # Memory limits the number of requests per pass: requests keep their logits between steps, and a step needs
        # several arrays that are as large as all requests' logits together. Each array is limited to 256 MB.
        logits = self.config.canvas_length * self.config.vocab_size
        self.max_batch = max(1, min(MAX_REFERENCE_BATCH, MAX_LOGITS // logits))
        self.max_context = self.config.max_position_embeddings
        self.prefill_chunk = self.max_context  # prompts are encoded in one chunk
        self._torch, self._new_cache = torch, DynamicCache
        if streamed:
            from canvasrt.fidelity.streamed import streamed_module

            self.module = streamed_module(checkpoint.folder)
        else:
            self.module = DiffusionGemmaForBlockDiffusion.from_pretrained(
                checkpoint.folder, dtype=torch.float32
            ).eval()

    @property
    def canvas_length(self) -> int:
        return self.config.canvas_length

    def check_canvas(self, length: int) -> None:
        """Raise CanvasError unless `length` is the checkpoint's canvas length."""
        if length != self.canvas_length:
            raise CanvasError(
                f"canvas_length is {length}, but the reference has canvases of {self.canvas_length} tokens",
                "leave out canvas_length",
            )

    def new_row(self) -> ReferenceRow:
        """Return the empty state of a new request."""
        text = self.module.config.get_text_config(decoder=True)
        return ReferenceRow(self._new_cache(config=text))

    def release(self, row: ReferenceRow) -> None:
        """Release a request's state."""
        row.logits = None

    def first_hidden(self, canvas: np.ndarray) -> np.ndarray:
        """Return a block's first canvas as its hidden states; there is no self-conditioning signal yet."""
        return np.array(canvas)

    def encode(self, inputs: Sequence[EncodeInput]) -> None:
        """Encode clean tokens into the caches of their requests."""
        for each in inputs:
            row: Any = each.row
            tokens = self._torch.from_numpy(np.ascontiguousarray(each.tokens))[None]
            with self._torch.no_grad():
                self.module.model.encoder(
                    input_ids=tokens,
                    past_key_values=row.cache,
                    position_ids=self._positions(row.length, tokens.shape[1]),
                )
            row.length += tokens.shape[1]

    def denoise_each(
        self, inputs: Iterable[DenoiseInput], count: int
    ) -> Generator[DenoiseOutput, None, None]:
        """Run one step of each of `count` requests, as `Model.denoise_each` does."""
        yield from self.denoise(list(inputs))

    def denoise(self, inputs: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        """Run one denoising step of each request; return the outputs in order. Caches do not change."""
        # Rows of equal length form a batch, which needs no padding. A row begins a new block if its canvas is not the
        # canvas that its last step returned.
        alike: dict[tuple[int, bool], list[int]] = {}
        for index, each in enumerate(inputs):
            row: Any = each.row
            goes_on = row.logits is not None and each.hidden is row.canvas
            alike.setdefault((row.length, goes_on), []).append(index)
        done: dict[int, DenoiseOutput] = {}
        for (_, goes_on), indices in alike.items():
            outputs = self._denoise([inputs[index] for index in indices], goes_on)
            done |= dict(zip(indices, outputs, strict=True))
        return [done[index] for index in range(len(inputs))]

    def next_hidden(self, row: ReferenceRow) -> np.ndarray:
        """Return the input of the next step's first layer, `[canvas, D]`, after a step of `row`."""
        decoder = self.module.model.decoder
        assert row.logits is not None
        with self._torch.no_grad():
            embedded = decoder.embed_tokens(self._torch.from_numpy(row.canvas))
            shares = (row.logits / row.temperature).softmax(-1)
            soft = shares @ decoder.embed_tokens.weight * decoder.embed_tokens.embed_scale
            return decoder.self_conditioning(embedded, soft).numpy()

    def _denoise(self, inputs: Sequence[DenoiseInput], goes_on: bool) -> list[DenoiseOutput]:
        torch = self._torch
        rows: list[Any] = [each.row for each in inputs]
        signal = None
        if goes_on:
            signal = torch.stack([row.logits / row.temperature for row in rows])
        for row in rows:
            row.logits = None
        with torch.no_grad():
            logits = self.module(
                decoder_input_ids=torch.from_numpy(np.stack([each.hidden for each in inputs])),
                past_key_values=_joined([row.cache for row in rows]),
                self_conditioning_logits=signal,
                decoder_position_ids=self._positions(rows[0].length, self.canvas_length),
            ).logits
            del signal
            outputs = []
            for given, row, own in zip(inputs, rows, logits, strict=True):
                row.logits, row.temperature = own, float(given.temperature)
                outputs.append(self._sample(own / row.temperature, given))
                row.canvas = outputs[-1].canvas
        return outputs

    def _sample(self, logits: Tensor, given: DenoiseInput) -> DenoiseOutput:
        """Run the sampler of `export/head.py` over logits `[canvas, V]` that were already divided
        by the temperature."""
        from canvasrt.export.head import accept, draw, vocabulary_grid

        torch = self._torch
        argmax = logits.argmax(-1)
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        mass = (logits - logits.amax(-1, keepdim=True)).exp_()
        bound = torch.tensor([given.entropy_bound], dtype=torch.float32)
        accepted = accept(entropy[None], bound)[0]
        uniforms = torch.from_numpy(given.uniforms)
        drawn = draw(mass[None], uniforms[None], vocabulary_grid(self.config.vocab_size))[0]
        canvas = torch.where(accepted, drawn, torch.from_numpy(given.noise)).numpy()
        return DenoiseOutput(canvas, argmax.numpy(), entropy.numpy(), accepted.numpy(), canvas)

    def _positions(self, start: int, count: int) -> Tensor:
        return self._torch.arange(start, start + count)[None]


def _joined(caches: list[Any]) -> Any:
    """Join caches of equal length into one read-only cache."""
    if len(caches) == 1:
        return caches[0]
    joined = copy.copy(caches[0])
    joined.layers = []
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        layer = copy.copy(layers[0])
        layer.keys = _stack(layers, "keys")
        layer.values = _stack(layers, "values")
        joined.layers.append(layer)
    return joined


def _stack(layers: Sequence[Any], name: str) -> Tensor:
    import torch

    return torch.cat([getattr(layer, name) for layer in layers])
