"""Measures graphs or engines on a device through the runtime's model class. One body segment is loaded for all."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench.shape import Prepared
from canvasrt.bundle import Bundle, Manifest
from canvasrt.checkpoints.config import ModelConfig
from canvasrt.engine_profiles import Profiles
from canvasrt.runtime.engine import DeviceBackend, Engine, EngineCall
from canvasrt.runtime.gpu.device_model import DeviceModel
from canvasrt.runtime.noise import step_noise
from canvasrt.runtime.passes import DenoiseInput

WARM_UP = 4  # a call is captured when it occurs for the third time
# A canvas's tokens determine its routing, since equal tokens have the same experts. "even": tokens of the whole
# vocabulary. "skewed": few different tokens, some of them frequent. "padded": a second half of padding, as after a
# short answer.
Routing = Literal["even", "skewed", "padded"]
ROUTINGS: tuple[Routing, ...] = ("even", "skewed", "padded")
FEW = 64
_LAYER = re.compile(r"^((?:past|new)_(?:key|value)_)(\d+)$")


def routed(tokens: np.ndarray, config: ModelConfig, routing: Routing) -> np.ndarray:
    """Turn random `tokens`, int64 `[canvas]`, into a canvas with this routing."""
    if routing == "padded":
        half = len(tokens) // 2
        return np.concatenate([tokens[:half], np.full(len(tokens) - half, config.pad_token_id)])
    if routing == "skewed":
        # Token n is about 1 / n times as frequent as the first.
        return (FEW ** (tokens / config.vocab_size)).astype(np.int64)
    return tokens


def shifted(name: str, by: int) -> str:
    """Add `by` to a layer's number: `past_key_2` by 6 → `past_key_8`. Other names stay."""
    match = _LAYER.match(name)
    return f"{match[1]}{int(match[2]) + by}" if match else name


class ReplicaEngine:
    """An engine whose layers are renumbered to start at `by`."""

    def __init__(self, engine: Engine, number: int, by: int) -> None:
        self._engine, self._by = engine, by
        self.name = f"body_{number}"
        self.inputs = {shifted(name, by): dtype for name, dtype in engine.inputs.items()}
        self.outputs = {shifted(name, by): dtype for name, dtype in engine.outputs.items()}

    @property
    def profiles(self) -> Profiles:
        return self._engine.profiles

    def prepare(self) -> None:
        self._engine.prepare()

    def launch(self, call: EngineCall) -> None:
        shapes = {shifted(name, -self._by): shape for name, shape in call.shapes.items()}
        addresses = {shifted(name, -self._by): at for name, at in call.addresses.items()}
        self._engine.launch(replace(call, shapes=shapes, addresses=addresses))


class _Replicas:
    """A backend that opens the one prepared body segment, of `layers` layers, for every body segment."""

    def __init__(self, backend: DeviceBackend, layers: int) -> None:
        self._backend, self._layers = backend, layers
        self.rows_apart, self.device = backend.rows_apart, backend.device
        self.keep_compiled = backend.keep_compiled

    def open_engine(self, name: str, file: Path, profiles: Any) -> Any:
        kind, _, number = name.partition("_")
        if kind != "body":
            return self._backend.open_engine(name, file, profiles)
        engine = self._backend.open_engine("body_0", file, profiles)
        return ReplicaEngine(engine, int(number), int(number) * self._layers)


class DeviceRunner:
    """Graphs or engines with a device's memory. A batch runs in shared passes, which have room for the largest
    batch."""

    def __init__(
        self,
        prepared: Prepared,
        backend: DeviceBackend,
        max_context: int,
        bundle: Bundle | None = None,
    ) -> None:
        """Open `bundle`, the engines built from the prepared graphs; if it is None, open the graphs."""
        made = bundle or prepared.graphs
        self._device: Any = backend.device
        self._used = self._device.memory()[0]
        layers = prepared.shape.layers
        entries = {entry["name"]: entry for entry in made.manifest.segments}
        bodies = [
            {
                **entries["body_0"],
                "name": f"body_{n}",
                "layers": range(n * layers, (n + 1) * layers),
            }
            for n in range(prepared.shape.copies)
        ]
        whole = {"model": prepared.config.to_json(), "segments": [*bodies, entries["head"]]}
        # Without a pass plan in the manifest, the model uses all pass shapes that the engines support.
        manifest = Manifest({**made.manifest.data, **whole, "passes": None})
        replicas = _Replicas(backend, layers)
        self.model = DeviceModel(Bundle(made.path, manifest), replicas, max_context)

    def pass_ms(
        self, batch: int, context: int, repeats: int, routing: Routing = "even"
    ) -> list[float]:
        """Return milliseconds of denoising passes of `batch` requests with `context` cached tokens each."""
        self.model.share_passes(batch > 1)
        rows = [self.model.new_row() for _ in range(batch)]
        for row in rows:
            # The cache holds zeros. Reading them takes as long as reading real keys and values.
            self.model.workspace.cache.take(row)
            self.model.workspace.cache.make_room(row, context)
            row.length = context
        config = self.model.config

        def noise(seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
            uniforms, tokens = step_noise(seed, 0, step, config.canvas_length, config.vocab_size)
            return uniforms, routed(tokens, config, routing)

        # With a bound of 0, a step accepts almost nothing, so its noise becomes the next canvas and sets the routing.
        bound = 0.1 if routing == "even" else 0.0
        hidden = [self.model.first_hidden(noise(seed, 0)[1]) for seed in range(batch)]
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
        for row in rows:
            self.model.release(row)
        return took[WARM_UP:]

    def memory(self) -> int:
        """Return the bytes of device memory in use."""
        return int(self._used - self._device.memory()[0])
