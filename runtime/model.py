"""A loaded bundle: encodes tokens to KV caches, and denoises canvases."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from canvasrt.bundle import Bundle
from canvasrt.defaults import PREFILL_CHUNK
from canvasrt.errors import CanvasError
from canvasrt.runtime.bundle_facts import map_table, scaled_embeddings
from canvasrt.runtime.host_head import HostHead
from canvasrt.runtime.passes import (
    Counters,
    DenoiseInput,
    DenoiseOutput,
    EncodeInput,
    Hidden,
    Row,
    Saved,
)
from canvasrt.runtime.pictures import Picture

InputT = TypeVar("InputT", EncodeInput, DenoiseInput)
BatchT = TypeVar("BatchT")
OutputT = TypeVar("OutputT")


class Model(ABC):
    """The engines of one bundle, and the memory-mapped embedding table. Not thread-safe."""

    # maximum number of requests per pass; None means no limit
    max_batch: int | None = None
    device_name = "cpu"
    # The number of passes in a request's turn. After its turn, a request can be parked to let another one run.
    quantum = 8
    # The number of denoising steps that take about as long as encoding `prefill_chunk` tokens.
    chunk_steps = 1

    def __init__(self, bundle: Bundle, max_context: int, rows_apart: bool) -> None:
        self.bundle = bundle
        self.config, self.sampler = bundle.manifest.model, bundle.manifest.sampler
        self.max_context = max_context
        self.counters = Counters()
        self.prefill_chunk = PREFILL_CHUNK
        self.rows_apart = rows_apart
        self._table = map_table(bundle)

    @property
    def canvas_length(self) -> int:
        return self.config.canvas_length

    @property
    def canvas_sizes(self) -> tuple[int, ...]:
        """The possible lengths of a canvas, ascending."""
        return (self.canvas_length,)

    def check_canvas(self, length: int) -> None:
        """Raise CanvasError if the engines do not support canvases of this length."""
        if length not in self.canvas_sizes:
            sizes = ", ".join(map(str, self.canvas_sizes))
            raise CanvasError(
                f"the engines have no canvas of {length} positions, only of {sizes}",
                "build the bundle again with this version, or leave out canvas_length",
            )

    def check_scores(self) -> None:
        """Raise CanvasError if the model cannot score blocks."""
        _ = self.host_head
        if self.prefill_chunk < self.canvas_length:
            raise CanvasError(
                f"the engines encode at most {self.prefill_chunk} tokens together, so they cannot "
                f"score blocks of {self.canvas_length}",
                "leave out score_blocks and redo_below",
            )

    @cached_property
    def host_head(self) -> HostHead:
        """The head, computed on the host. Raises CanvasError if the bundle lacks the head's weights."""
        return HostHead.load(self.bundle, self._table)

    def warm_up(self) -> None:  # noqa: B027 - optional
        """Prepare all kinds of passes, so that no request waits for preparations."""

    @abstractmethod
    def new_row(self) -> Row:
        """Return the empty state of a new request."""

    def release(self, row: Row) -> None:  # noqa: B027 - optional
        """Release a request's state, which must not be used again."""

    @property
    def has_vision(self) -> bool:
        """Whether the bundle has a vision tower."""
        return any(each["name"] == "vision" for each in self.bundle.manifest.segments)

    def check_vision(self) -> None:
        """Raise CanvasError for a model without a vision tower."""
        if not self.has_vision:
            raise CanvasError(
                "messages have images, and the engines have no vision tower",
                "send only text, or serve engines with a vision tower; they need a checkpoint that "
                "has one, and a GPU with enough memory",
            )

    def check_pictures(self, pictures: Sequence[Picture]) -> None:
        """Raise CanvasError if the model has no vision tower, or if an image takes too many tokens."""
        self.check_vision()
        for picture in pictures:
            if picture.tokens > self.prefill_chunk:
                raise CanvasError(
                    f"an image takes {picture.tokens} tokens, and the engines encode at most "
                    f"{self.prefill_chunk} together",
                    "ask for fewer image_tokens",
                )

    def see(self, picture: Picture) -> np.ndarray:
        """Return an image's soft tokens, float32 `[tokens, hidden_size]`. Raises EngineError if the tower fails."""
        features = self._see(picture)
        self.counters.images += 1
        return features

    @abstractmethod
    def _see(self, picture: Picture) -> np.ndarray: ...

    def park(self, row: Row, hidden: Hidden) -> tuple[Hidden, bool]:
        """Release a request's place in the batch. Return the hidden states with which the request continues later, and
        whether its tokens must be encoded again."""
        return hidden, False

    def revise(
        self, row: Row, hidden: Hidden, places: np.ndarray, states: np.ndarray
    ) -> np.ndarray:
        """Return a copy of a step's next hidden states, `hidden`. At the positions `places` `[n]`, the copy has
        `states` `[n, hidden_size]` instead."""
        revised = np.array(self._fetch(row, hidden))
        revised[places] = states
        return revised

    def _fetch(self, row: Row, hidden: Hidden) -> np.ndarray:
        """Return hidden states as an array in host memory."""
        return np.asarray(hidden)

    def check_device(self) -> None:  # noqa: B027 - only devices can fail
        """Wait for the device. Raises EngineError if the device is no longer usable."""

    def reserve(self, limit: int) -> int:
        """Reserve up to `limit` bytes of memory for saved chunks. Return the number of reserved bytes."""
        return limit

    @abstractmethod
    def saved_bytes(self, tokens: int) -> int:
        """Return the size of a saved chunk of `tokens` tokens, in bytes."""

    def save(self, row: Row, tokens: int) -> Saved:
        """Return a copy of the cached keys and values of a request's last `tokens` tokens. The request's latest pass
        must have encoded these tokens."""
        return Saved(tokens, self._save(row, tokens))

    def restore(self, row: Row, saved: Sequence[Saved]) -> None:
        """Append saved chunks to a request's cache, as if they had been encoded."""
        self._restore(row, saved)
        self.counters.cached_tokens += sum(each.tokens for each in saved)

    def forget(self, saved: Saved) -> None:  # noqa: B027 - host memory frees itself
        """Free the memory of a saved chunk."""

    @abstractmethod
    def _save(self, row: Row, tokens: int) -> Any: ...

    @abstractmethod
    def _restore(self, row: Row, saved: Sequence[Saved]) -> None: ...

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Return scaled embeddings, float32 `[..., hidden_size]`, of int64 `tokens` `[...]`."""
        return scaled_embeddings(self._table, tokens)

    def first_hidden(self, canvas: np.ndarray) -> np.ndarray:
        """Return the hidden states `[canvas, hidden_size]` of a block's first canvas, without self-conditioning."""
        embedded = self.embed(canvas)
        square = np.mean(embedded * embedded, axis=-1, keepdims=True, dtype=np.float32)
        return embedded / np.sqrt(square + np.float32(self.config.rms_norm_eps))

    def encode(self, inputs: Sequence[EncodeInput]) -> None:
        """Add clean tokens to their requests' caches."""
        start = time.perf_counter()
        batches = self._batches(inputs)
        self._map(self._encode_pass, batches)
        self.counters.encode_passes += len(batches)
        self.counters.encode_tokens += sum(len(item.tokens) for item in inputs)
        self.counters.encode_seconds += time.perf_counter() - start

    def denoise(self, inputs: Sequence[DenoiseInput]) -> list[DenoiseOutput]:
        """Run one denoising step of every request; return the outputs in order. Does not modify caches."""
        return list(self.denoise_each(inputs, len(inputs)))

    def denoise_each(
        self, inputs: Iterable[DenoiseInput], count: int
    ) -> Generator[DenoiseOutput, None, None]:
        """Run one denoising step of `count` requests; yield the outputs in order. Close the generator before you run
        other passes.

        Some models start passes before all inputs are known: they iterate over `inputs` on any thread, and yield
        outputs while other passes run.
        """
        given = list(inputs)
        start = time.perf_counter()
        batches = self._batches(given)
        done: dict[int, DenoiseOutput] = {}
        for batch, outputs in zip(batches, self._map(self._denoise_pass, batches), strict=True):
            done |= {id(item): out for item, out in zip(batch, outputs, strict=True)}
        self.counters.denoise_passes += len(batches)
        self.counters.denoise_seconds += time.perf_counter() - start
        yield from (done[id(item)] for item in given)

    @abstractmethod
    def _batches(self, inputs: Sequence[InputT]) -> list[Sequence[InputT]]:
        """Group the inputs into passes, in any order."""

    def _map(self, run: Callable[[BatchT], OutputT], batches: Sequence[BatchT]) -> list[OutputT]:
        return [run(batch) for batch in batches]

    @abstractmethod
    def _encode_pass(self, batch: Sequence[EncodeInput]) -> None: ...

    @abstractmethod
    def _denoise_pass(self, batch: Sequence[DenoiseInput]) -> list[DenoiseOutput]: ...
