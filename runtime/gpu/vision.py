"""Runs the vision tower on a device: turns an image's patches into soft tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from canvasrt.checkpoints.config import ModelConfig
from canvasrt.defaults import SOFT_TOKENS
from canvasrt.runtime.engine import Device, Engine, EngineCall
from canvasrt.runtime.gpu.launches import Pass
from canvasrt.runtime.gpu.workspace import Workspace
from canvasrt.runtime.passes import EncodeInput
from canvasrt.runtime.pictures import BUDGETS, Picture


class VisionTower:
    """The tower's engine and its memory, for one image at a time."""

    def __init__(self, device: Device, engine: Engine, config: ModelConfig) -> None:
        assert config.vision is not None
        self._device, self._engine = device, engine
        self._square = config.vision["pooling_kernel_size"] ** 2
        self._hidden = config.hidden_size
        patches = self._square * SOFT_TOKENS
        self._pixel = 3 * config.vision["patch_size"] ** 2
        sizes = {
            "pixel_values": patches * self._pixel * engine.inputs["pixel_values"].itemsize,
            "pixel_positions": patches * 2 * engine.inputs["pixel_positions"].itemsize,
            "features": SOFT_TOKENS * self._hidden * engine.outputs["features"].itemsize,
            "valid": SOFT_TOKENS,
        }
        self._addresses = {name: device.allocate(size) for name, size in sizes.items()}

    def see(self, picture: Picture) -> np.ndarray:
        """Return an image's soft tokens, float32 `[tokens, hidden_size]`.

        The image is padded to the smallest budget that holds it, because kernels for any other number of patches would
        have to be compiled first.
        """
        budget = min(each for each in BUDGETS if each >= picture.tokens)
        self._launch(budget, picture.pixels, picture.positions)
        features = np.empty((picture.tokens, self._hidden), self._engine.outputs["features"])
        self._device.download(features.view(np.uint8), self._addresses["features"])
        self._device.synchronize()
        return features.astype(np.float32)

    def warm_up(self, keep_compiled: Callable[[], None]) -> None:
        """Run the tower once for every size that an image can have; call `keep_compiled` after each run."""
        for budget in BUDGETS:
            self._launch(budget, np.empty((0, self._pixel)), np.empty((0, 2), np.int64))
            self._device.synchronize()
            keep_compiled()

    def _launch(self, budget: int, pixels: np.ndarray, positions: np.ndarray) -> None:
        patches = self._square * budget
        # The tower ignores patches at (-1, -1).
        for name, array, filler in (
            ("pixel_values", pixels, 0),
            ("pixel_positions", positions, -1),
        ):
            padding = ((0, patches - len(array)), (0, 0))
            padded = np.pad(
                array.astype(self._engine.inputs[name]), padding, constant_values=filler
            )
            self._device.upload(self._addresses[name], padded)
        shapes = {
            "pixel_values": (1, patches, self._pixel),
            "pixel_positions": (1, patches, 2),
            "features": (1, budget, self._hidden),
            "valid": (1, budget),
        }
        # Exported graphs use this expression as the name of the patch dimension.
        dims = {"images": 1, f"{self._square}*soft_tokens": patches}
        self._engine.launch(EngineCall(dims, shapes, self._addresses, repeats=False))


def place(space: Workspace, this: Pass, batch: Sequence[EncodeInput], hidden: np.ndarray) -> None:
    """Insert the soft tokens of a pass's images into the embeddings `hidden`, `[batch, length, hidden_size]`. Queue the
    upload of every token's image number."""
    groups = space.pictures.view("groups", this.batch, this.length)
    groups[:] = -1
    for item in batch:
        if item.groups is not None and item.features is not None:
            here = slice(0, len(item.groups))
            groups[this.index(item.row), here] = item.groups
            hidden[this.index(item.row), here][item.groups >= 0] = item.features
    space.pictures.upload()
