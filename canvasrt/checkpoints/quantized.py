"""Reads, without torch, how a checkpoint in the Hugging Face layout was quantized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from canvasrt.checkpoints.locate import CONFIG, MODELOPT, CheckpointFiles
from canvasrt.errors import CanvasError
from canvasrt.formats import FORMATS, most_demanding
from canvasrt.types import Json

_MODELOPT = {each.modelopt: each for each in FORMATS.values() if each.modelopt}
_LAYOUTS = {
    layout: (each, each.compressed)
    for each in FORMATS.values()
    if each.compressed
    for layout in each.compressed.layouts
}
# How many INT4 weights can share a scale in both TensorRT and ONNX Runtime.
INT4_GROUPS = (16, 32, 64, 128, 256)
INT4_HINT = "use a checkpoint with symmetric weights in groups, or quantize the bf16 checkpoint with canvasrt"
# Unsupported tensors that a checkpoint can have next to INT4 weights → what they contain.
_INT4_EXTRAS = {"weight_zero_point": "zero points", "weight_g_idx": "reordered inputs"}
_INPUTS = ("tensor", "token")  # the strategies for inputs: one scale per tensor or per token
_HINT = (
    "canvasrt reads ModelOpt's NVFP4 and FP8, and compressed-tensors' FP8 and INT4 (W4A16);"
    " otherwise, quantize the bf16 checkpoint with `canvasrt build --precision`"
)


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint was quantized.

    Attributes:
        producer: the tool that wrote the checkpoint, followed by the tool's version if the checkpoint states it.
        algorithm: the tool's own name for the algorithm.
        precision: the most demanding format of the weights, which a GPU must support.
        static: False if scales of activations are missing and must be computed at run time.
    """

    producer: str
    algorithm: str
    precision: str
    static: bool = True

    def to_json(self) -> Json:
        """Return a JSON object with one key per field."""
        return asdict(self)


def quantization_of(files: CheckpointFiles) -> Quantization | None:
    """Return how a checkpoint was quantized; None if its weights are not quantized.

    Raises CanvasError for broken files, and for unsupported algorithms; the message names the algorithm.
    """
    if files.modelopt is not None:
        file, found = files.folder / MODELOPT, files.modelopt.get("quantization")
        if not isinstance(found, dict):
            raise _broken(file, "it has no `quantization` object")
        return _modelopt(file, found, files.modelopt.get("producer"))
    file, found = files.folder / CONFIG, files.config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise _broken(file, "quantization_config is not an object")
    method = found.get("quant_method")
    if method == "modelopt":
        return _modelopt(file, found, found.get("producer"))
    if method == "compressed-tensors":
        return _compressed_tensors(file, found, files.tensors)
    raise _unknown(file, f"{method!r}")


def _modelopt(file: Path, found: Json, producer: object) -> Quantization | None:
    algorithm = found.get("quant_algo")
    if algorithm is None:  # only the key-value cache is quantized
        return None
    layers = found.get("quantized_layers") if algorithm == "MIXED_PRECISION" else None
    each = [found] if not isinstance(layers, dict) else list(layers.values())
    for settings in each:
        name = settings.get("quant_algo") if isinstance(settings, dict) else settings
        if name not in _MODELOPT:
            raise _unknown(file, f"ModelOpt's {name!r}")
        size, blocks = settings.get("group_size"), _MODELOPT[name].blocks
        if blocks and size not in (None, *blocks):
            raise _unknown(file, f"{name} in groups of {size}")
    formats = {_MODELOPT[settings["quant_algo"]].name for settings in each}
    return Quantization(_producer("modelopt", producer), algorithm, most_demanding(formats))


def _compressed_tensors(file: Path, found: Json, tensors: Iterable[str]) -> Quantization:
    layout = found.get("format")
    groups = found.get("config_groups")
    if layout not in _LAYOUTS:
        raise _unknown(file, f"compressed-tensors' {layout!r}")
    format, compressed = _LAYOUTS[layout]
    if not isinstance(groups, dict) or not groups:
        raise _broken(file, "quantization_config has no config_groups")
    # QuIP and SpinQuant rotate weights before they are stored, and may rotate other values at run time.
    rotations = (found.get("transform_config") or {}).get("config_groups") or {}
    rotated = {str(each.get("location")) for one in rotations.values() for each in one["apply"]}
    if online := sorted(rotated - {"weight_input", "weight_output"}):
        raise _unknown(file, f"rotations at run time (transform_config: {', '.join(online)})")
    static = True
    for name, group in groups.items():
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        _check(file, f"{name}'s weights", weights, compressed.kind, compressed.strategies)
        if inputs and not format.rounds_inputs:
            raise _unknown(file, f"{name}'s weights in {format.name} and inputs that are quantized")
        if inputs:
            _check(file, f"{name}'s input_activations", inputs, compressed.kind, _INPUTS)
        static &= not format.rounds_inputs or (bool(inputs) and not inputs.get("dynamic"))
    algorithm = format.name.upper() + ("" if static else "-dynamic")
    made = Quantization(_producer("compressed-tensors", found), algorithm, format.name, static)
    # Also look for unsupported tensors, because configurations do not always mention them.
    for name in () if format.rounds_inputs else sorted(tensors):
        if what := _INT4_EXTRAS.get(name.rpartition(".")[2]):
            raise CanvasError(
                f"{name} in {file.parent}: INT4 with {what} is not supported", INT4_HINT
            )
    return made


def _check(
    file: Path, name: str, found: Mapping[str, Any], wanted: str, strategies: tuple[str, ...]
) -> None:
    kind = f"{found.get('type')}{found.get('num_bits')}"
    if kind != wanted:
        raise _unknown(file, f"{name} of {kind}")
    if found.get("strategy") not in strategies:
        raise _unknown(file, f"{name} with scales by {found.get('strategy')!r}")
    if found.get("strategy") == "group" and found.get("group_size") not in INT4_GROUPS:
        raise _unknown(file, f"{name} in groups of {found.get('group_size')}")
    if found.get("symmetric") is False:
        raise _unknown(file, f"{name} with zero points (symmetric: false)")
    if found.get("actorder") not in (None, False, "weight", "static"):
        raise _unknown(file, f"{name} with reordered inputs (actorder: {found['actorder']})")


def _producer(method: str, producer: object) -> str:
    version = producer.get("version") if isinstance(producer, dict) else None
    name = producer.get("name", method) if isinstance(producer, dict) else method
    return f"{name} {version}" if version else str(name)


def _broken(file: Path, why: str) -> CanvasError:
    return CanvasError(f"{file} is damaged: {why}", "fetch the file again")


def _unknown(file: Path, what: str) -> CanvasError:
    return CanvasError(f"{file}: quantized with {what}, which canvasrt does not support", _HINT)
