"""The interface of a side, and our own sides: graphs or engines on a device, and graphs on the CPU."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from bench.replicas import ReplicaEngine, ReplicaSegment, TimedEngine
from bench.shape import Prepared
from canvasrt.bundle import Bundle
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.runtime.bench import measure_round, random_prompts
from canvasrt.runtime.bundle_facts import map_table
from canvasrt.runtime.engine import Backend, DeviceBackend
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.gpu.workspace import DeviceSegment
from canvasrt.runtime.host_model import BodySegment, HostModel
from canvasrt.runtime.model import Model
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseInput
from canvasrt.runtime.request import Request
from canvasrt.runtime.sampling_params import SamplingParams

WARM_UP = 4  # a call is captured when it occurs for the third time
# The tokens of a canvas by routing, since equal tokens have the same experts: all of the vocabulary; a few, some of
# them frequent; or a second half of padding, as after a short answer.
Routing = Literal["even", "skewed", "padded"]
ROUTINGS: tuple[Routing, ...] = ("even", "skewed", "padded")
FEW = 64


def routed(tokens: np.ndarray, config: ModelConfig, routing: Routing) -> np.ndarray:
    """Return random `tokens` int64 `[canvas]` as a canvas of this routing."""
    if routing == "padded":
        half = len(tokens) // 2
        return np.concatenate([tokens[:half], np.full(len(tokens) - half, config.pad_token_id)])
    if routing == "skewed":
        # Token n is about 1 / n times as frequent as the first.
        return (FEW ** (tokens / config.vocab_size)).astype(np.int64)
    return tokens


@dataclass(frozen=True)
class Generation:
    """A run of some requests to their end, with all steps taken. Times are in seconds."""

    tokens: int
    seconds: float
    first_tokens: float
    step_seconds: tuple[float, ...]


class Runner(Protocol):
    """One side of the comparison."""

    def pass_ms(
        self, batch: int, context: int, repeats: int, routing: Routing = "even"
    ) -> list[float]:
        """Return milliseconds of denoising passes of `batch` requests with `context` cached tokens each.

        `routing` decides the canvases. If this side draws its own canvases, the result is empty for all routings but
        `even`.
        """
        ...

    def segments_ms(self, batch: int, context: int, repeats: int) -> dict[str, float]:
        """Return median milliseconds of each part of a denoising pass; empty if parts cannot be told apart."""
        ...

    def generate(self, batch: int, prompt: int, blocks: int, steps: int) -> Generation:
        """Run whole requests with prompts of `prompt` tokens."""
        ...

    def memory(self) -> int | None:
        """Return the bytes of device memory in use; None on the CPU."""
        ...

    def loads(self) -> list[int]:
        """Return, per layer, the most tokens given to one expert in the last pass."""
        ...


class OurRunner(ABC):
    """The common part of our two sides: everything runs through the runtime's own model."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def pass_ms(
        self, batch: int, context: int, repeats: int, routing: Routing = "even"
    ) -> list[float]:
        rows = [self.model.new_row() for _ in range(batch)]
        for row in rows:
            self._fill(row, context)
        took = self._passes(rows, repeats, routing)
        for row in rows:
            self.model.release(row)
        return took

    def _passes(self, rows: Sequence[Any], repeats: int, routing: Routing) -> list[float]:
        def noise(seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
            config = self.model.config
            uniforms, tokens = step_noise(seed, 0, step, config.canvas_length, config.vocab_size)
            return uniforms, routed(tokens, config, routing)

        # With this bound, a step accepts almost nothing, so its noise becomes the next canvas.
        bound = 0.1 if routing == "even" else 0.0
        hidden = [self.model.first_hidden(noise(seed, 0)[1]) for seed in range(len(rows))]
        took = []
        for step in range(1, WARM_UP + repeats + 1):
            inputs = [
                DenoiseInput(row, hidden[seed], np.float32(0.6), bound, *noise(seed, step))
                for seed, row in enumerate(rows)
            ]
            begin = time.perf_counter()
            outputs = self.model.denoise(inputs)
            took.append(1e3 * (time.perf_counter() - begin))
            hidden = [output.next_hidden for output in outputs]
        return took[WARM_UP:]

    @abstractmethod
    def _fill(self, row: Any, context: int) -> None:
        """Make a row's cache hold `context` tokens; each side has its own way."""

    def generate(self, batch: int, prompt: int, blocks: int, steps: int) -> Generation:
        config = self.model.config
        params = SamplingParams.from_defaults(
            self.model.sampler,
            config,
            max_new_tokens=blocks * config.canvas_length,
            max_denoising_steps=steps,
            early_stop=False,
            eos_token_ids=(),
        )
        prompts = random_prompts(config, batch, prompt)
        sample = measure_round(self.model, [Request(ids, params) for ids in prompts])
        first = statistics.median(sample.first_tokens)
        return Generation(sample.tokens, sample.seconds, first, tuple(sample.step_seconds))


class HostRunner(OurRunner):
    """Our graphs through ONNX Runtime on the CPU."""

    def __init__(self, prepared: Prepared, backend: Backend) -> None:
        manifest, layers = prepared.graphs.manifest, prepared.shape.layers
        segment = backend.open("body_0", prepared.graphs.file("body_0.onnx"))
        self._parts = [
            ReplicaSegment(segment, f"body_{copy}", copy * layers)
            for copy in range(prepared.shape.copies)
        ]
        head = backend.open("head", prepared.graphs.file("head.onnx"))
        self._head = ReplicaSegment(head, "head", 0)
        bodies = [
            BodySegment(part, tuple(range(copy * layers, (copy + 1) * layers)))
            for copy, part in enumerate(self._parts)
        ]
        model = HostModel(
            prepared.config,
            manifest.sampler,
            bodies,
            self._head,
            map_table(prepared.graphs),
            prepared.shape.max_context,
            rows_apart=False,
        )
        super().__init__(model)

    def _fill(self, row: Any, context: int) -> None:
        for index, layer in enumerate(self.model.config.layers):
            shape = (1, layer.num_kv_heads, context, layer.head_dim)
            row.cache.append(index, *(np.zeros(shape, np.float32) for _ in "kv"))
        row.cache.advance(context)

    def segments_ms(self, batch: int, context: int, repeats: int) -> dict[str, float]:
        parts = [*self._parts, self._head]
        for part in parts:
            part.seconds.clear()
        self.pass_ms(batch, context, repeats)
        return {part.name: 1e3 * statistics.median(part.seconds[WARM_UP:]) for part in parts}

    def memory(self) -> int | None:
        return None

    def loads(self) -> list[int]:
        return [int(load) for part in self._parts for load in part.load]


class DeviceRunner(OurRunner):
    """Our graphs or engines over a device's memory. A batch shares passes, which have room for the largest batch."""

    def __init__(
        self, prepared: Prepared, backend: DeviceBackend, bundle: Bundle | None = None
    ) -> None:
        """Open `bundle`, engines built from the prepared graphs, or the graphs themselves if None."""
        bundle = bundle or prepared.graphs
        device: Any = backend.device
        layers = prepared.shape.layers
        entries = {entry["name"]: entry for entry in bundle.manifest.segments}
        self._used = device.memory()[0] if hasattr(device, "memory") else 0
        segments = []
        for copy in range(prepared.shape.copies):
            held = tuple(range(copy * layers, (copy + 1) * layers))
            engine = ReplicaEngine(_open(backend, bundle, entries["body_0"]), copy, copy * layers)
            segments.append(DeviceSegment(TimedEngine(engine, device), held))
        segments.append(DeviceSegment(TimedEngine(_open(backend, bundle, entries["head"]), device)))
        self._timed: list[Any] = [segment.engine for segment in segments]
        self._device = device
        super().__init__(
            DeviceModel(
                prepared.config,
                bundle.manifest.sampler,
                segments,
                map_table(prepared.graphs),
                prepared.shape.max_context,
                backend,
            ),
        )

    def pass_ms(
        self, batch: int, context: int, repeats: int, routing: Routing = "even"
    ) -> list[float]:
        assert isinstance(self.model, DeviceModel)
        self.model.share_passes(batch > 1)
        return super().pass_ms(batch, context, repeats, routing)

    def _fill(self, row: Any, context: int) -> None:
        # The memory holds zeros, which cost as much to read as keys and values.
        assert isinstance(self.model, DeviceModel)
        self.model.workspace.cache.take(row)
        self.model.workspace.cache.make_room(row, context)
        row.length = context

    def segments_ms(self, batch: int, context: int, repeats: int) -> dict[str, float]:
        for engine in self._timed:
            engine.marks = []
        self.pass_ms(batch, context, repeats)
        found = {}
        for engine in self._timed:
            took = [1e3 * self._device.elapsed(*pair) for pair in engine.marks]
            found[engine.name] = statistics.median(took[WARM_UP:])
            engine.marks = None
        return found

    def memory(self) -> int | None:
        if not hasattr(self._device, "memory"):
            return None
        return self._used - self._device.memory()[0]

    def loads(self) -> list[int]:
        assert isinstance(self.model, DeviceModel)
        results = self.model.workspace.results
        return [
            int(load)
            for number, segment in enumerate(self.model.segments[:-1])
            for load in results.view(f"load_{number}", len(segment.layers))
        ]


def _open(backend: DeviceBackend, bundle: Bundle, entry: Any) -> Any:
    return backend.open_engine(entry["name"], bundle.file(entry["file"]), entry.get("profiles"))
