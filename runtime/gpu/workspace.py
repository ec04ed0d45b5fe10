"""The memory of a model on a device, taken once, and where each tensor of a call lies in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.engine import Device, Engine
from canvasrt.runtime.gpu.buffers import Transfer, aligned, constant
from canvasrt.runtime.gpu.slots import DeviceCache

ATTENTION_KINDS = ("sliding", "full")


@dataclass(frozen=True)
class DeviceSegment:
    """One engine of the chain and its layers."""

    engine: Engine
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class WorkspaceSizes:
    """The largest sizes that memory is taken for."""

    batch: int
    encode_tokens: int  # of the one request that an encoding pass takes
    past: Mapping[str, int]  # per kind of layer
    widths: tuple[int, ...]  # that a full layer's may have

    def denoise_tokens(self, config: ModelConfig) -> int:
        return self.batch * config.canvas_length


class Workspace:
    """Every buffer of a model. `bytes` lists their sizes by purpose."""

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        segments: Sequence[DeviceSegment],
        sizes: WorkspaceSizes,
    ) -> None:
        self._device, self._config, self.segments = device, config, tuple(segments)
        self.sizes = sizes
        *bodies, head = segments
        self.hidden_dtype = _one_dtype(bodies, head)
        self.itemsizes = _cache_itemsizes(bodies)
        self.row_bytes = config.canvas_length * config.hidden_size * self.hidden_dtype.itemsize
        canvas, batch = sizes.denoise_tokens(config), sizes.batch
        self.cache = DeviceCache(
            device, config, batch, dict(sizes.past), self.itemsizes, sizes.widths
        )
        tokens = max(canvas, sizes.encode_tokens)
        # Each slot's hidden states between steps, and the head's latest output.
        self.state = device.allocate(batch * self.row_bytes)
        self.next_hidden = device.allocate(batch * self.row_bytes)
        # Each segment's input is kept until the pass is over, since the segment may have to run again.
        hidden = tokens * config.hidden_size * self.hidden_dtype.itemsize
        self.hidden = [device.allocate(hidden) for _ in segments]
        self.given = _given(device, tokens, canvas, batch)
        # Only passes with images have groups.
        self.pictures = Transfer(device, {"groups": (np.int64, sizes.encode_tokens)})
        self.results = _results(device, canvas, bodies)
        self.slots = constant(device, np.arange(tokens, dtype=np.int64))
        # Each expert's own queue; and the queue of all tokens, which comes after them.
        self.queues = constant(device, np.arange(config.num_experts, dtype=np.int64))
        self.all_tokens = constant(device, np.array([config.num_experts], np.int64))
        self.groups = constant(device, np.full(tokens, -1, np.int64))
        self.causal = {
            "encode": constant(device, np.ones(batch, np.bool_)),
            "denoise": constant(device, np.zeros(batch, np.bool_)),
        }
        self._new, new_bytes = self._plan_new(bodies)
        self._new_base = device.allocate(new_bytes)
        self.bytes = {
            "key-value cache": self.cache.bytes,
            "hidden states": hidden * len(segments) + 2 * batch * self.row_bytes,
            "new keys and values": new_bytes,
            "scratch": self.cache.scratch_bytes,
        }
        device.synchronize()  # the constants' host arrays end here

    def last_hidden(self, batch: int, length: int) -> np.ndarray:
        """Wait for the last layer's output, and return it: float32 `[batch, length, hidden_size]`."""
        held = np.empty((batch, length, self._config.hidden_size), self.hidden_dtype)
        self._device.download(held, self.hidden[-1])
        self._device.synchronize()
        return held.astype(np.float32)

    def load(self, number: int) -> np.ndarray:
        """Return the largest number of tokens of an expert in each layer of a body segment: int64 `[layers]`."""
        return self.results.view(f"load_{number}", len(self.segments[number].layers))

    def new(self, phase: str, layer: int) -> tuple[int, int]:
        """Return the addresses for a layer's new keys and values."""
        keys, values = self._new[phase, layer]
        return self._new_base + keys, self._new_base + values

    def _plan_new(
        self, bodies: Sequence[DeviceSegment]
    ) -> tuple[dict[tuple[str, int], tuple[int, int]], int]:
        """Return the offsets of new keys and values, and their total bytes.

        An encoding pass reads every layer's at its end. A denoising pass reads none, so its segments
        overwrite each other's.
        """
        offsets: dict[tuple[str, int], tuple[int, int]] = {}
        total = 0
        tokens = {
            "encode": self.sizes.encode_tokens,
            "denoise": self.sizes.denoise_tokens(self._config),
        }
        for phase, count in tokens.items():
            end = 0
            for body in bodies:
                end = 0 if phase == "denoise" else end
                for layer in body.layers:
                    shape = self._config.layers[layer]
                    size = aligned(
                        shape.num_kv_heads * count * shape.head_dim * self.itemsizes[layer]
                    )
                    offsets[phase, layer] = (end, end + size)
                    end += 2 * size
                total = max(total, end)
        return offsets, total


def _given(device: Device, tokens: int, canvas: int, batch: int) -> Transfer:
    """Return the buffers of what the host gives a pass, for so many tokens of it."""
    return Transfer(
        device,
        {
            "positions": (np.int64, tokens),
            "noise": (np.int64, canvas),
            "uniforms": (np.float32, canvas),
            "temperature": (np.float32, batch),
            "entropy_bound": (np.float32, batch),
        },
    )


def _results(device: Device, canvas: int, bodies: Sequence[DeviceSegment]) -> Transfer:
    """Return the buffers of what a pass gives the host, for so many tokens of all canvases."""
    loads = {f"load_{i}": (np.int64, len(body.layers)) for i, body in enumerate(bodies)}
    return Transfer(
        device,
        {
            "canvas": (np.int64, canvas),
            "argmax": (np.int64, canvas),
            "entropy": (np.float32, canvas),
            "accepted": (np.bool_, canvas),
            **loads,
        },
    )


def _one_dtype(bodies: Sequence[DeviceSegment], head: DeviceSegment) -> np.dtype:
    """Return the dtype of hidden states, which every engine must share."""
    dtypes = {body.engine.inputs["hidden"] for body in bodies}
    dtypes |= {body.engine.outputs["hidden_out"] for body in bodies}
    dtypes |= {head.engine.inputs["hidden"], head.engine.outputs["next_hidden"]}
    if len(dtypes) > 1:
        raise CanvasError(
            f"the bundle's engines disagree on hidden states: {', '.join(map(str, dtypes))}",
            "build the bundle again, from one set of graphs",
        )
    return dtypes.pop()


def _cache_itemsizes(bodies: Sequence[DeviceSegment]) -> list[int]:
    """Return the bytes of one cached number per layer. New keys are copied unconverted, so dtypes
    must match."""
    sizes: dict[int, int] = {}
    for body in bodies:
        for layer in body.layers:
            found = {body.engine.inputs[f"past_{part}_{layer}"] for part in ("key", "value")}
            found |= {body.engine.outputs[f"new_{part}_{layer}"] for part in ("key", "value")}
            if len(found) > 1:
                raise CanvasError(
                    f"{body.engine.name}: layer {layer} reads and writes keys and values of "
                    f"different dtypes: {', '.join(map(str, found))}",
                    "export and build the bundle again",
                )
            sizes[layer] = found.pop().itemsize
    return [sizes[layer] for layer in range(len(sizes))]
