"""A network that has the weights of only one layer in memory at a time.

The tokens of all requests run through a layer before the next layer is read. So one sweep over the weights runs one
pass of every request.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canvasrt.defaults import MAX_CONTEXT, PREFILL_CHUNK
from canvasrt.errors import CanvasError
from canvasrt.export.layers import rms_norm
from canvasrt.export.quantize.observed_part import (
    CachedRow,
    Call,
    Observed,
    ObservedPart,
)
from canvasrt.export.quantize.saved_sweeps import SavedSweeps
from canvasrt.export.quantize.stored_weights import WeightSource
from canvasrt.export.segments import segments
from canvasrt.runtime.passes import DenoiseInput, DenoiseOutput, EncodeInput

# How many tokens run through a layer together: enough that every expert gets many, but so few that activations take at
# most a few hundred MB.
_TOGETHER = 4096


class StreamedNetwork:
    """A model for `canvasrt.runtime.generator` that records activations.

    Encoding is delayed until the next denoising step, so that one sweep does both.
    """

    quantum = sys.maxsize  # no request is ever suspended to let others run
    chunk_steps = 1

    def __init__(
        self,
        weights: WeightSource,
        max_batch: int,
        saved: SavedSweeps,
        observed: Observed | None = None,
    ) -> None:
        self.config, self.sampler = weights.config, weights.sampler
        self.max_batch = max_batch
        self.max_context = min(self.config.max_position_embeddings, MAX_CONTEXT)
        self.prefill_chunk = PREFILL_CHUNK
        self.observed = observed or Observed()
        self.sweeps = 0
        self._weights = weights
        self._device = torch.device(device_here())
        parts = segments(self.config, 1)
        self._layers = [ObservedPart(each, self.observed) for each in parts if each.layers]
        (head,) = (each for each in parts if each.name == "head")
        self._head = ObservedPart(head, self.observed)
        every = [*self._layers, self._head]
        self._room = torch.empty(
            max(each.bytes(weights) for each in every), dtype=torch.uint8, device=self._device
        )
        self._encoding: list[Call] = []
        self._saved = saved
        # The outputs of all sweeps so far, including sweeps before an interruption. Hidden states are left out.
        self._outputs: list[list[dict[str, Tensor]]] = []
        self._earlier: list[Any] = saved.state.get("outputs", [])
        self._rows: dict[int, CachedRow] = {}
        self._started = 0
        self._changed: set[int] = set()  # rows that changed since the last save

    @property
    def canvas_length(self) -> int:
        return self.config.canvas_length

    @property
    def is_repeating(self) -> bool:
        """Whether an interrupted calibration saved the outputs of the next sweep."""
        return self.sweeps < len(self._earlier)

    def check_canvas(self, length: int) -> None:
        """Accept any canvas length."""

    def new_row(self) -> CachedRow:
        """Return the empty state of a new request."""
        layers = self.config.layers
        empty = [torch.empty(1, each.num_kv_heads, 0, each.head_dim) for each in layers]
        row = CachedRow(self._started, [(each, each) for each in empty])
        self._rows[row.number] = row
        self._started += 1
        return row

    def release(self, row: CachedRow) -> None:
        """Drop a request's keys and values."""
        row.caches.clear()
        del self._rows[row.number]

    def first_hidden(self, canvas: np.ndarray) -> Tensor:
        """Return the hidden states `[canvas, D]` of a block's first canvas, without self-conditioning."""
        return rms_norm(self._embed(canvas), self.config.rms_norm_eps)

    def encode(self, inputs: Sequence[EncodeInput]) -> None:
        """Let the next sweep add clean tokens to the caches of their requests."""
        for each in inputs:
            row: CachedRow = each.row
            hidden = self._embed(each.tokens)[None]
            self._encoding.append(Call(row, row.length, hidden, is_causal=True))
            row.length += len(each.tokens)

    def denoise_each(
        self, inputs: Iterable[DenoiseInput], count: int
    ) -> Generator[DenoiseOutput, None, None]:
        """Run one step of every request in `inputs`, and yield the outputs in order."""
        yield from self.denoise(list(inputs))

    def denoise(self, inputs: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        """Encode all waiting tokens and run one step of every request, in one sweep. If an interrupted calibration
        saved this sweep, return the saved outputs."""
        if self.is_repeating:
            outputs = self._again()
        else:
            outputs = self._sweep(inputs)
        self._encoding = []
        self._outputs.append([_tensors(each) for each in outputs])
        if self.sweeps > len(self._earlier) and self._saved.is_due:
            self._save(outputs)
        return outputs

    @torch.no_grad()
    def _sweep(self, inputs: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        canvases = [Call(i.row, i.row.length, i.hidden[None], is_causal=False) for i in inputs]
        calls = [*self._encoding, *canvases]
        self._changed |= {each.row.number for each in self._encoding}
        with torch.device(self._device):
            for layer in self._layers:
                layer.load(self._weights, self._room, check=not self.sweeps)
                for group in _groups(calls):
                    self._run_layer(layer.module, group)
            self._head.load(self._weights, self._room, check=not self.sweeps)
            outputs = [self._run_head(*pair) for pair in zip(canvases, inputs, strict=True)]
        self.sweeps += 1
        self.observed.check()
        return outputs

    def _again(self) -> list[DenoiseOutput]:
        """Return the outputs that an interrupted calibration saved for this sweep. If this sweep is the last saved one,
        also restore the state that the next sweep needs."""
        found = [
            {name: each.numpy() for name, each in output.items()}
            for output in self._earlier[self.sweeps]
        ]
        self.sweeps += 1
        if self.sweeps < len(self._earlier):
            return [DenoiseOutput(**each) for each in found]
        state = self._saved.state
        for seen, kept in (
            (self.observed.amax, state["amax"]),
            (self.observed.routed, state["routed"]),
        ):
            seen |= {name: each.to(self._device) for name, each in kept.items()}
        for row in self._rows.values():
            row.caches[:] = self._saved.caches(row.number)
        pairs = zip(found, state["hidden"], strict=True)
        return [DenoiseOutput(**each, next_hidden=hidden) for each, hidden in pairs]

    def _save(self, outputs: Sequence[DenoiseOutput]) -> None:
        state = {
            "outputs": self._outputs,
            "hidden": [each.next_hidden for each in outputs],
            "amax": {name: each.cpu() for name, each in self.observed.amax.items()},
            "routed": {layer: each.cpu() for layer, each in self.observed.routed.items()},
        }
        changed = {n: self._rows[n].caches for n in self._changed if n in self._rows}
        self._saved.save(self.sweeps, state, changed, set(self._rows))
        self._changed.clear()

    def _embed(self, tokens: np.ndarray) -> Tensor:
        return self._weights.embeddings(tokens) * self.config.hidden_size**0.5

    def _run_layer(self, segment: Any, calls: Sequence[Call]) -> None:
        """Run one layer over the concatenated tokens of all calls. Only attention keeps the calls apart."""
        lengths = [each.length for each in calls]
        x = torch.cat([each.hidden for each in calls], 1).to(self._device)
        causal = torch.cat([torch.full((each.length,), each.is_causal) for each in calls])
        valid = torch.ones(len(causal), 1, dtype=torch.bool)
        x, *_ = segment.layers[0](x, calls, None, (None, None), causal, valid, None)
        for call, hidden in zip(calls, x.cpu().split(lengths, 1), strict=True):
            call.hidden = hidden

    def _run_head(self, call: Call, step: DenoiseInput) -> DenoiseOutput:
        canvas, argmax, entropy, accepted, hidden = self._head.module(
            call.hidden.to(self._device),
            torch.tensor([float(step.temperature)]),
            torch.tensor([float(step.entropy_bound)]),
            torch.from_numpy(step.uniforms)[None].to(self._device),
            torch.from_numpy(step.noise)[None].to(self._device),
        )
        shown = [each[0].cpu().numpy() for each in (canvas, argmax, entropy, accepted)]
        return DenoiseOutput(shown[0], shown[1], shown[2], shown[3], next_hidden=hidden[0].cpu())


def device_here() -> str:
    """Return the device on which networks run: `cuda` or `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def gpu_memory() -> Iterator[None]:
    """Free all GPU memory at the end, because builders time kernels on the GPU next. Raises CanvasError if GPU memory
    runs out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CanvasError(
            f"calibration ran out of GPU memory: {str(error).partition('. GPU')[0]}",
            "end other programs on the GPU (nvidia-smi lists them) and repeat the command, which continues after the"
            " last saved sweep; or set CUDA_VISIBLE_DEVICES to an empty string to calibrate on the CPU, from the first"
            " sweep. If the engines can only be built on this GPU, set it only for `canvasrt export` or"
            " `canvasrt quantize`, and build from the graphs that this command writes",
        ) from error
    finally:
        torch.cuda.empty_cache()


def _groups(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """Divide the calls, in order, into groups of at most `_TOGETHER` tokens. A longer call forms a group alone."""
    group: list[Call] = []
    for call in calls:
        if group and sum(each.length for each in group) + call.length > _TOGETHER:
            yield group
            group = []
        group.append(call)
    if group:
        yield group


def _tensors(output: DenoiseOutput) -> dict[str, Tensor]:
    names = ("canvas", "argmax", "entropy", "accepted")
    return {name: torch.from_numpy(getattr(output, name)) for name in names}
