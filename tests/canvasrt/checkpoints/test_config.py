"""Reading a checkpoint's configuration: every valid form, and every error."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from canvasrt.checkpoints.config import Layer, ModelConfig, SamplerDefaults, read_config
from canvasrt.checkpoints.locate import read_files
from canvasrt.checkpoints.released import TEXT_CONFIG, VISION_CONFIG, released_model
from canvasrt.errors import CanvasError
from tests.conftest import CONFIG, GENERATION_CONFIG


def read_folder(folder: Path) -> tuple[ModelConfig, SamplerDefaults]:
    files = read_files(folder)
    return read_config(files.config, files.generation, files.preprocessing)


def changed(**text: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    config["text_config"].update(text)
    return config


def without(*names: str, **text: Any) -> dict[str, Any]:
    config = changed(**text)
    for name in names:
        del config["text_config"][name]
    return config


def seeing(vision: dict[str, Any] | None = None, **text: Any) -> dict[str, Any]:
    """Return a configuration with a vision tower."""
    return {**changed(**text), "vision_config": {"hidden_size": 64, **(vision or {})}}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """Return a configuration with other RoPE parameters of one kind of attention."""
    own = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6},
    }
    return changed(rope_parameters={**own, kind: {**own[kind], **parameters}})


def test_reads_sizes_layers_and_sampler(checkpoint_files: Path) -> None:
    model, sampler = read_folder(checkpoint_files)
    assert model.layers == (
        Layer("sliding", head_dim=16, num_kv_heads=1, rope_theta=10_000.0, rope_partial=1.0),
        Layer("full", head_dim=32, num_kv_heads=1, rope_theta=1_000_000.0, rope_partial=0.25),
    )
    assert (model.hidden_size, model.vocab_size, model.canvas_length) == (32, 96, 16)
    assert model.logit_softcap == 30.0
    assert model.eos_token_ids == (1, 7)
    assert sampler == SamplerDefaults(
        max_denoising_steps=12,
        entropy_bound=0.25,
        t_min=0.3,
        t_max=0.9,
        stability_threshold=2,
        confidence_threshold=0.01,
        max_new_tokens=256,
    )


def test_agrees_with_transformers_for_every_form_of_the_layer_overrides(tmp_path: Path) -> None:
    from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig

    given = {k: v for k, v in CONFIG["text_config"].items() if k != "per_layer_config"}
    given |= {"num_key_value_heads": 2, "global_head_dim": 64, "num_global_key_value_heads": 1}
    text = DiffusionGemmaTextConfig(**{k: v for k, v in given.items() if k != "model_type"})
    DiffusionGemmaConfig(text_config=text, canvas_length=16).save_pretrained(tmp_path)
    written, _ = read_folder(tmp_path)
    older, _ = read_config({**CONFIG, "text_config": given}, None)
    expected = [text.per_layer_config[i] for i in range(2)]
    assert [layer.head_dim for layer in written.layers] == [e.head_dim for e in expected]
    assert [layer.num_kv_heads for layer in written.layers] == [
        e.num_key_value_heads for e in expected
    ]
    assert older.layers == written.layers


def test_reads_the_released_configuration_as_transformers_writes_it(tmp_path: Path) -> None:
    """With more than ten layers, transformers writes layer numbers with leading zeros."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig, Gemma4VisionConfig

    text, vision = DiffusionGemmaTextConfig(**TEXT_CONFIG), Gemma4VisionConfig(**VISION_CONFIG)
    DiffusionGemmaConfig(text_config=text, vision_config=vision).save_pretrained(tmp_path)
    assert (
        "05"
        in json.loads((tmp_path / "config.json").read_text())["text_config"]["per_layer_config"]
    )
    model, _ = read_folder(tmp_path)
    assert model.layers == released_model().layers


def test_defaults_are_the_reference_s() -> None:
    """Keys that config.json omits get the defaults of transformers."""
    from transformers import DiffusionGemmaTextConfig

    config = without("layer_types", "per_layer_config", "sliding_window", num_hidden_layers=7)
    model, sampler = read_config(config, None)
    reference = DiffusionGemmaTextConfig(num_hidden_layers=7, num_key_value_heads=1)
    kinds = [f"{layer.kind}_attention" for layer in model.layers]
    assert kinds == reference.layer_types
    assert model.layers[-1].kind == "full"
    assert model.layers[-1].head_dim == 512
    assert model.sliding_window == 512
    assert sampler == SamplerDefaults()


def test_end_of_sequence_comes_from_the_generation_config_when_there_is_one() -> None:
    assert read_config(CONFIG, None)[0].eos_token_ids == (1,)
    assert read_config(CONFIG, {})[0].eos_token_ids == ()
    assert read_config(CONFIG, {"eos_token_id": 5})[0].eos_token_ids == (5,)


def test_survives_a_round_trip_through_json() -> None:
    model, sampler = read_config(CONFIG, GENERATION_CONFIG)
    assert ModelConfig.from_json(json.loads(json.dumps(model.to_json()))) == model
    assert SamplerDefaults.from_json(json.loads(json.dumps(sampler.to_json()))) == sampler


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({}, "None"),
        ({"model_type": "diffusion_gemma"}, "no text_config"),
        (changed(hidden_size="big"), "hidden_size"),
        (changed(hidden_size=0), "hidden_size"),
        (changed(vocab_size=None), "vocab_size"),
        (changed(sliding_window=1), "sliding_window"),
        (without("num_experts"), "num_experts"),
        (changed(hidden_activation="silu"), "hidden_activation"),
        (changed(tie_word_embeddings=False), "tie_word_embeddings"),
        (changed(use_bidirectional_attention="all"), "use_bidirectional_attention"),
        (changed(attention_bias=True), "attention_bias"),
        (rope("full_attention", factor=8.0), "factor"),
        (rope("full_attention", rope_type="default"), "'proportional'"),
        (rope("full_attention", rope_theta=None), "rope_theta"),
        (rope("sliding_attention", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (changed(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (changed(rope_scaling={"rope_type": "linear", "factor": 4.0}), "rope_scaling"),
        (seeing(use_bidirectional_attention=None), "use_bidirectional_attention"),
        (seeing({"hidden_activation": "silu"}), "vision_config: hidden_activation 'silu'"),
        (changed(layer_types=["sliding_attention"]), "layer_types"),
        (changed(layer_types=["chunked_attention", "full_attention"]), "chunked_attention"),
        (changed(per_layer_config={"1": {"sliding_window": 3}}), "sliding_window"),
        (
            changed(layer_types=["full_attention"] * 2, per_layer_config={"1": {"head_dim": 8}}),
            "same kind of attention differ",
        ),
        (changed(top_k_experts=9), "top_k_experts 9 of 4"),
        (changed(num_attention_heads=3, num_key_value_heads=2), "KV heads"),
        (changed(eos_token_id="stop"), "eos_token_id"),
    ],
)
def test_refuses_what_it_has_no_graph_for(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CanvasError, match=said):
        read_config(config, None)


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ({"sampler_config": {"_cls_name": "OtherConfig", "entropy_bound": 1.0}}, "'OtherConfig'"),
    ],
)
def test_refuses_settings_that_it_would_not_follow(generation: dict[str, Any], said: str) -> None:
    with pytest.raises(CanvasError, match=said):
        read_config(CONFIG, generation)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_refuses_images_prepared_in_another_way(file: str, tmp_path: Path) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    config = seeing(dict.fromkeys(("patch_size", "pooling_kernel_size"), 4))
    (tmp_path / "config.json").write_text(json.dumps({**config, "image_token_id": 5}))
    given = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=4).to_dict()
    nested = file == "processor_config.json"
    (tmp_path / file).write_text(json.dumps({"image_processor": given} if nested else given))
    read_folder(tmp_path)
    changes = {"rescale_factor": 1 / 127.5, "patch_size": 8, "max_soft_tokens": 140}
    for name, value in {"do_normalize": True, **changes}.items():
        other = {**given, "image_mean": [0.5] * 3, name: value}
        (tmp_path / file).write_text(json.dumps({"image_processor": other} if nested else other))
        with pytest.raises(CanvasError, match=f"{file}: {name}"):
            read_folder(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00"])
def test_a_broken_file_is_named(checkpoint_files: Path, name: str, content: bytes) -> None:
    (checkpoint_files / name).write_bytes(content)
    with pytest.raises(CanvasError, match=name):
        read_folder(checkpoint_files)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CanvasError, match=r"no config\.json"):
        read_folder(tmp_path)
