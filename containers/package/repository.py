"""Writes Triton's model repository: a decoupled model with the engines, and a model for single answers."""

from __future__ import annotations

import json
from pathlib import Path

from canvasrt.containers.tensors import ANSWER_MODEL, STREAM_MODEL, Tensor, inputs_of, outputs_of

_MODEL_PY = '''\
"""Loaded by Triton's Python backend; the work is done in canvasrt.containers.triton."""

from canvasrt.containers.triton.{module} import {name} as TritonPythonModel  # noqa: F401
'''


def write_repository(folder: Path, engines: str, *, max_batch: int | None = None) -> None:
    """Write both models into `folder`.

    `engines` is the engine bundle, relative to `folder`. Up to `max_batch` canvases are denoised together; None means
    the engines' limit.
    """
    options = {"engines": engines, "max_batch": max_batch}
    parameters = {name: str(value) for name, value in options.items() if value is not None}
    _write_model(
        folder / STREAM_MODEL, "backend", "StreamModel", model_config(STREAM_MODEL, parameters)
    )
    _write_model(
        folder / ANSWER_MODEL, "answer_model", "AnswerModel", model_config(ANSWER_MODEL, {})
    )


def model_config(model: str, parameters: dict[str, str]) -> str:
    """Return the config.pbtxt of one model."""
    lines = [f'name: "{model}"', 'backend: "python"', "max_batch_size: 0"]
    if model == STREAM_MODEL:
        lines.append("model_transaction_policy { decoupled: true }")
    lines += [_tensor("input", tensor, optional=True) for tensor in inputs_of(model)]
    lines += [_tensor("output", tensor) for tensor in outputs_of(model)]
    # One process per model, so that all requests can share batches.
    lines.append("instance_group { kind: KIND_CPU count: 1 }")
    for name, value in parameters.items():
        # JSON string literals are valid in protobuf's text format.
        quoted = json.dumps(value, ensure_ascii=False)
        lines.append(f'parameters {{ key: "{name}" value {{ string_value: {quoted} }} }}')
    return "\n".join(lines) + "\n"


def _tensor(kind: str, tensor: Tensor, optional: bool = False) -> str:
    dims = ", ".join(map(str, tensor.shape))
    tail = " optional: true" if optional else ""
    return (
        f'{kind} {{ name: "{tensor.name}" data_type: {tensor.config_type} dims: [{dims}]{tail} }}'
    )


def _write_model(folder: Path, module: str, name: str, config: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    (folder / "1" / "model.py").write_text(
        _MODEL_PY.format(module=module, name=name), encoding="utf-8"
    )
