"""Reading the quantization in a checkpoint's configuration, and refusing unknown kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from canvasrt.checkpoints.locate import CheckpointFiles, read_files
from canvasrt.checkpoints.quantized import Quantization, quantization_of
from canvasrt.errors import CanvasError

_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.45.0"}}


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}


def compressed(format: str = "float-quantized", **group: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
    }


def rotated(*locations: str) -> dict[str, Any]:
    """Return a configuration with rotations, as llm-compressor writes it for QuIP and SpinQuant."""
    from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme

    args = [TransformArgs(targets=["Linear"], location=each) for each in locations]
    config = TransformConfig(config_groups={"v": TransformScheme(type="hadamard", apply=args)})
    found = compressed("pack-quantized", weights=_INT4)
    return {**found, "transform_config": config.model_dump()}


def configured(quantization: dict[str, Any] | None) -> CheckpointFiles:
    return CheckpointFiles(Path("checkpoint"), {"quantization_config": quantization})


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (None, None),
        (
            {**_MODELOPT, "quant_algo": "NVFP4", "group_size": 16},
            Quantization("modelopt 0.45.0", "NVFP4", "nvfp4"),
        ),
        ({**_MODELOPT, "quant_algo": "FP8"}, Quantization("modelopt 0.45.0", "FP8", "fp8")),
        # Only the KV cache is quantized.
        ({**_MODELOPT, "quant_algo": None, "kv_cache_quant_algo": "FP8"}, None),
        (
            {
                **_MODELOPT,
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
            },
            Quantization("modelopt 0.45.0", "MIXED_PRECISION", "nvfp4"),
        ),
        (
            compressed(weights=_FP8, input_activations=_TOKENS),
            Quantization("compressed-tensors", "FP8-dynamic", "fp8", static=False),
        ),
        (
            compressed(weights=_FP8, input_activations=_FP8 | {"strategy": "tensor"}),
            Quantization("compressed-tensors", "FP8", "fp8"),
        ),
        (
            compressed("pack-quantized", weights=_INT4, input_activations=None),
            Quantization("compressed-tensors", "INT4", "int4"),
        ),
        (
            compressed("pack-quantized", weights=_INT4 | {"strategy": "channel"}),
            Quantization("compressed-tensors", "INT4", "int4"),
        ),
        # These rotations are already applied to the weights.
        (
            rotated("weight_input", "weight_output"),
            Quantization("compressed-tensors", "INT4", "int4"),
        ),
    ],
)
def test_what_it_says(quantization: dict[str, Any] | None, expected: Quantization | None) -> None:
    assert quantization_of(configured(quantization)) == expected


def test_modelopts_own_file_is_enough() -> None:
    found = {"producer": {"version": "0.45.0"}, "quantization": {"quant_algo": "NVFP4"}}
    files = CheckpointFiles(Path("checkpoint"), {}, modelopt=found)
    assert quantization_of(files) == Quantization("modelopt 0.45.0", "NVFP4", "nvfp4")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantized with 'gptq'"),
        ({**_MODELOPT, "quant_algo": "W4A16_AWQ"}, "ModelOpt's 'W4A16_AWQ'"),
        ({**_MODELOPT, "quant_algo": "NVFP4", "group_size": 32}, "NVFP4 in groups of 32"),
        (
            {**_MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "INT4"}},
            "ModelOpt's 'INT4'",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "compressed-tensors' 'marlin-24'",
        ),
        (compressed("pack-quantized", weights=_INT4 | {"num_bits": 8}), "weights of int8"),
        (
            compressed("pack-quantized", weights=_INT4 | {"symmetric": False}),
            "zero points .symmetric: false.",
        ),
        (
            compressed("pack-quantized", weights=_INT4 | {"group_size": 44}),
            "weights in groups of 44",
        ),
        (
            compressed("pack-quantized", weights=_INT4 | {"actorder": "group"}),
            "reordered inputs .actorder: group.",
        ),
        (
            compressed("pack-quantized", weights=_INT4, input_activations=_TOKENS),
            "weights in int4 and inputs that are quantized",
        ),
        (compressed(weights=_FP8 | {"strategy": "block"}), "scales by 'block'"),
        (compressed(weights=_FP8 | {"type": "int"}), "weights of int8"),
        ({**compressed(), "config_groups": {}}, "has no config_groups"),
        (
            rotated("weight_input", "input", "output"),
            "rotations at run time .transform_config: input, output.",
        ),
    ],
)
def test_what_is_not_known_is_named(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CanvasError, match=message):
        quantization_of(configured(quantization))


@pytest.mark.parametrize("text", ["{", "[]", '{"quantization": 4}'])
def test_broken_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(CanvasError, match=r"hf_quant_config\.json"):
        quantization_of(read_files(tmp_path))
