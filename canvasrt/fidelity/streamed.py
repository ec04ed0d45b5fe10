"""transformers' model with only one layer's weights in memory at a time, for checkpoints that do not fit in memory.

Weights that the checkpoint stores quantized are dequantized.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from canvasrt.checkpoints.weight_names import DECODER, ENCODER
from canvasrt.export.checkpoint import Checkpoint
from canvasrt.export.compressed_tensors import read_int4
from canvasrt.export.modelopt import read_codes
from canvasrt.export.weights import Weight, parts_of

if TYPE_CHECKING:
    from torch import Tensor

# The output projection's weight is the embedding table. (All other shared weights have one name in the encoder, and
# another in the decoder.)
_SHARED = {"lm_head.weight": f"{DECODER}.embed_tokens.weight"}
_VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")


def streamed_module(path: Path) -> Any:
    """Load a checkpoint in fp32. Layers are loaded when they run; the vision tower is not loaded."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    checkpoint = Checkpoint(path)
    config = DiffusionGemmaConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with _without_parameters():
        module = DiffusionGemmaForBlockDiffusion._from_config(config, dtype=torch.float32)
    for name, buffer in module.named_buffers():
        if name in checkpoint:
            buffer.copy_(checkpoint.read(name))
    layers: list[tuple[str, Any]] = []
    for prefix, holder in (
        (DECODER, module.model.decoder),
        (ENCODER, module.model.encoder.language_model),
    ):
        layers += [(f"{prefix}.layers.{i}.", layer) for i, layer in enumerate(holder.layers)]
    room: dict[tuple[str, torch.Size], Tensor] = {}
    for prefix, layer in layers:
        _stream(layer, prefix.replace(ENCODER, DECODER), checkpoint, room)
    later = (*(prefix for prefix, _ in layers), *_VISION)
    read: dict[str, Tensor] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if name.startswith(later):
            continue
        source = _SHARED.get(name, name.replace(ENCODER, DECODER))
        if source not in read:
            wide = torch.empty(parameter.shape)
            read_wide(checkpoint, source, wide)
            read[source] = nn.Parameter(wide, requires_grad=False)
        _put(module, name, read[source])
    return module.eval()


def read_wide(checkpoint: Checkpoint, name: str, wide: Tensor) -> None:
    """Read a parameter of transformers' model, plain or quantized in the checkpoint, into the float32 tensor `wide`."""
    shape, flat, first = wide.shape, wide.view(-1), 0
    for part in wide_rows(checkpoint, (name,), tuple(shape)):
        flat[first : first + part.numel()] = part.reshape(-1)
        first += part.numel()
    assert first == flat.numel(), name


def wide_rows(
    checkpoint: Checkpoint, parts: Sequence[str], shape: tuple[int, ...]
) -> Iterator[Tensor]:
    """Yield a weight of `shape` in float32, a few rows or experts at a time. The weight is stacked from `parts`."""
    weight = _weight(checkpoint, parts, shape)
    held = read_int4(weight) or read_codes(weight)
    yield from held.wide() if held else weight.read(torch.float32)


def held_format(checkpoint: Checkpoint, parts: Sequence[str], shape: tuple[int, ...]) -> str | None:
    """Return the format to which a checkpoint's weight is quantized; None if the weight is not quantized."""
    weight = _weight(checkpoint, parts, shape)
    held = read_int4(weight) or read_codes(weight)
    return held.form.format if held else None


def _weight(checkpoint: Checkpoint, parts: Sequence[str], shape: tuple[int, ...]) -> Weight:
    names = parts_of(tuple(parts), shape, checkpoint)
    return Weight(names[0], shape, names, checkpoint)


def _stream(
    layer: nn.Module,
    prefix: str,
    checkpoint: Checkpoint,
    room: dict[tuple[str, torch.Size], Tensor],
) -> None:
    """Make a layer read its weights before it runs, and drop them afterwards.

    Layers run one at a time and share the memory in `room`, because allocating memory takes as long as filling it.
    """
    empty = dict(layer.named_parameters())

    def read(name: str) -> Tensor:
        key = name, empty[name].shape
        if key not in room:
            room[key] = torch.empty(empty[name].shape)
        read_wide(checkpoint, prefix + name, room[key])
        return room[key]

    def fill(*_: object) -> None:
        with ThreadPoolExecutor() as pool:
            for name, wide in zip(empty, pool.map(read, empty), strict=True):
                _put(layer, name, wide)

    def drop(*_: object) -> None:
        for name, parameter in empty.items():
            _put(layer, name, parameter)

    layer.register_forward_pre_hook(fill)
    layer.register_forward_hook(drop)


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter. The new parameter can have another device or size."""
    owner, _, last = name.rpartition(".")
    parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, False)
    module.get_submodule(owner)._parameters[last] = parameter


@contextlib.contextmanager
def _without_parameters() -> Iterator[None]:
    """Inside the `with` block, modules' parameters are created without data, but their buffers have data."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
