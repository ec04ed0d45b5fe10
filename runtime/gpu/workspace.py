"""A model's device memory, allocated once, and the tensors' addresses in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.errors import CanvasError
from canvasrt.runtime.engine import Device, Engine
from canvasrt.runtime.gpu.device_cache import DeviceCache, aligned


class Transfer:
    """Named arrays in one block of device memory and one of host memory, so that one copy transfers all of them."""

    def __init__(self, device: Device, fields: Mapping[str, tuple[type, int]]) -> None:
        """Allocate both blocks. `fields`: every array's dtype and maximum number of elements."""
        self._device = device
        self._dtypes: dict[str, np.dtype] = {
            name: np.dtype(dtype) for name, (dtype, _) in fields.items()
        }
        self._offsets: dict[str, int] = {}
        size = 0
        for name, (_, count) in fields.items():
            self._offsets[name] = size
            size += aligned(count * self._dtypes[name].itemsize)
        self._address = device.allocate(size)
        self._host = device.host(size)

    def view(self, name: str, *shape: int) -> np.ndarray:
        """Return the host's array in this shape, which can be smaller than the maximum."""
        dtype, begin = self._dtypes[name], self._offsets[name]
        return (
            self._host[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        )

    def address(self, name: str) -> int:
        """Return the address of an array on the device."""
        return self._address + self._offsets[name]

    def upload(self) -> None:
        """Queue the copy of all arrays to the device."""
        self._device.upload(self._address, self._host)

    def download(self) -> None:
        """Queue the copy of all arrays to the host."""
        self._device.download(self._host, self._address)


def constant(device: Device, array: np.ndarray) -> int:
    """Copy `array` to the device; return its address."""
    address = device.allocate(array.nbytes)
    device.upload(address, array)
    return address


@dataclass(frozen=True)
class DeviceSegment:
    """One engine, and the model's layers that the engine runs."""

    engine: Engine
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class WorkspaceSizes:
    """The maximum sizes for which memory is allocated."""

    batch: int
    encode_tokens: int  # maximum number of tokens of an encoding pass, which serves one request
    past: Mapping[str, int]  # for each kind of layer, the maximum cached tokens per request
    widths: tuple[
        int, ...
    ]  # possible numbers of cached tokens, with padding, that full layers read

    def denoise_tokens(self, config: ModelConfig) -> int:
        return self.batch * config.canvas_length


class Workspace:
    """All buffers of a model. `bytes` holds the total size of the buffers for each purpose."""

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
        # Every slot's hidden states between steps, and the head's latest output.
        self.state = device.allocate(batch * self.row_bytes)
        self.next_hidden = device.allocate(batch * self.row_bytes)
        # Every segment's input is kept until the pass ends, because the segment may have to run again.
        hidden = tokens * config.hidden_size * self.hidden_dtype.itemsize
        self.hidden = [device.allocate(hidden) for _ in segments]
        # The inputs that the host uploads for a pass.
        self.inputs = Transfer(
            device,
            {
                "positions": (np.int64, tokens),
                "noise": (np.int64, canvas),
                "uniforms": (np.float32, canvas),
                "temperature": (np.float32, batch),
                "entropy_bound": (np.float32, batch),
            },
        )
        # The number of the image that each token belongs to; only used in passes with images.
        self.pictures = Transfer(device, {"groups": (np.int64, sizes.encode_tokens)})
        # The outputs that the host downloads after a pass.
        loads = {f"load_{i}": (np.int64, len(body.layers)) for i, body in enumerate(bodies)}
        self.results = Transfer(
            device,
            {
                "canvas": (np.int64, canvas),
                "argmax": (np.int64, canvas),
                "entropy": (np.float32, canvas),
                "accepted": (np.bool_, canvas),
                **loads,
            },
        )
        self.slots = constant(device, np.arange(tokens, dtype=np.int64))
        # The numbers of the queues of tokens: one queue per expert, and a last queue of all tokens.
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
        device.synchronize()  # the constants' host arrays can be freed after this

    def last_hidden(self, batch: int, length: int) -> np.ndarray:
        """Wait for the last layer's output, and return it: float32 `[batch, length, hidden_size]`."""
        held = np.empty((batch, length, self._config.hidden_size), self.hidden_dtype)
        self._device.download(held, self.hidden[-1])
        self._device.synchronize()
        return held.astype(np.float32)

    def fullest(self, number: int) -> np.ndarray:
        """Return, for every layer of a body segment, the number of tokens routed to its busiest expert, int64
        `[layers]`."""
        return self.results.view(f"load_{number}", len(self.segments[number].layers))

    def new(self, phase: str, layer: int) -> tuple[int, int]:
        """Return the addresses for a layer's new keys and values."""
        keys, values = self._new[phase, layer]
        return self._new_base + keys, self._new_base + values

    def _plan_new(
        self, bodies: Sequence[DeviceSegment]
    ) -> tuple[dict[tuple[str, int], tuple[int, int]], int]:
        """Return the offsets of new keys and values, and their total size in bytes.

        At the end of an encoding pass, the new keys and values of all layers are needed. A denoising pass needs none of
        them, so its segments share memory.
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


def _one_dtype(bodies: Sequence[DeviceSegment], head: DeviceSegment) -> np.dtype:
    """Return the dtype of hidden states, which must be the same in all engines."""
    dtypes = {body.engine.inputs["hidden"] for body in bodies}
    dtypes |= {body.engine.outputs["hidden_out"] for body in bodies}
    dtypes |= {head.engine.inputs["hidden"], head.engine.outputs["next_hidden"]}
    if len(dtypes) > 1:
        raise CanvasError(
            f"the bundle's engines have different dtypes of hidden states: {', '.join(map(str, dtypes))}",
            "build the bundle again, from one set of graphs",
        )
    return dtypes.pop()


def _cache_itemsizes(bodies: Sequence[DeviceSegment]) -> list[int]:
    """Return every layer's item size in the cache. New keys and values are copied without conversion, so the dtypes of
    an engine's inputs and outputs must match."""
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
