"""Device memory for small tensors that cross to the host together, and for constants."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from canvasrt.runtime.engine import Device

ALIGNMENT = 256  # TensorRT's requirement for addresses


def aligned(size: int) -> int:
    """Round `size` up to the alignment of tensors."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Transfer:
    """Named arrays, side by side on the device and on the host, that cross in one copy."""

    def __init__(self, device: Device, fields: Mapping[str, tuple[type, int]]) -> None:
        """Allocate both sides. `fields` gives each array's dtype and maximum number of elements."""
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
        """Return the host side of an array in this call's shape, which may be smaller than the
        maximum."""
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
