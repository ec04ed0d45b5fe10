"""Blocks of a device's memory: small tensors that cross to the host together, and constants."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from canvasrt.runtime.engine import Device

ALIGNMENT = 256  # what TensorRT asks of an address


def aligned(size: int) -> int:
    """`size` rounded up to the alignment of tensors."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Block:
    """Named arrays, side by side on the device and on the host, that cross in one copy."""

    def __init__(self, device: Device, fields: Mapping[str, tuple[type, int]]) -> None:
        """fields: the dtype of an array and the most elements that it has."""
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
        """The host's side of an array of this call's shape, which may be less than the most."""
        dtype, begin = self._dtypes[name], self._offsets[name]
        return (
            self._host[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        )

    def address(self, name: str) -> int:
        """The device's side of an array."""
        return self._address + self._offsets[name]

    def upload(self) -> None:
        """Queues the copy of all arrays to the device."""
        self._device.upload(self._address, self._host)

    def download(self) -> None:
        """Queues the copy of all arrays to the host."""
        self._device.download(self._host, self._address)


def constant(device: Device, array: np.ndarray) -> int:
    """The address of a copy of `array` on the device."""
    address = device.allocate(array.nbytes)
    device.upload(address, array)
    return address
