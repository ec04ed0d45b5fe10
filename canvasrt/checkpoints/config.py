"""A DiffusionGemma checkpoint's configuration, read and checked without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from canvasrt.defaults import SOFT_TOKENS
from canvasrt.errors import CanvasError
from canvasrt.types import Json

MODEL_TYPE = "diffusion_gemma"
# Defaults of the reference, transformers 5.23, for keys that config.json can omit.
_ROPE_DEFAULTS: Json = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}
_DEFAULT_GLOBAL_HEAD_DIM = 512
FULL_EVERY = 6
_UNSUPPORTED_HINT = "canvasrt supports the architecture of google/diffusiongemma-26B-A4B-it"


@dataclass(frozen=True)
class Layer:
    """The attention of one layer. `rope_partial` is the fraction of a head's dimensions that RoPE rotates."""

    kind: Literal["sliding", "full"]
    head_dim: int
    num_kv_heads: int
    rope_theta: float
    rope_partial: float


@dataclass(frozen=True)
class SamplerDefaults:
    """The checkpoint's generation settings (generation_config.json)."""

    max_denoising_steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    max_new_tokens: int = 256

    def to_json(self) -> Json:
        """Return a JSON object with one key per field."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SamplerDefaults:
        """Return the inverse of `to_json`."""
        return cls(**_known_fields(cls, data))


@dataclass(frozen=True)
class ModelConfig:
    """The network's configuration. Sizes are in elements; ids are token ids."""

    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k_experts: int
    vocab_size: int
    num_attention_heads: int
    layers: tuple[Layer, ...]
    sliding_window: int
    rms_norm_eps: float
    logit_softcap: float
    canvas_length: int
    max_position_embeddings: int
    pad_token_id: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    image_token_id: int | None = None
    boi_token_id: int | None = None
    eoi_token_id: int | None = None
    vision: Json | None = None

    def to_json(self) -> Json:
        """Return a JSON object with one key per field."""
        data = asdict(self)
        data["layers"] = [asdict(layer) for layer in self.layers]
        data["eos_token_ids"] = list(self.eos_token_ids)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Return the inverse of `to_json`."""
        values = _known_fields(cls, data)
        values["layers"] = tuple(Layer(**_known_fields(Layer, layer)) for layer in data["layers"])
        values["eos_token_ids"] = tuple(data["eos_token_ids"])
        return cls(**values)


def read_config(
    config: Json, generation: Json | None, preprocessing: Mapping[str, Json] | None = None
) -> tuple[ModelConfig, SamplerDefaults]:
    """Parse config.json and generation_config.json. `generation` is None if the checkpoint has no such file.

    preprocessing: the files that say how images are prepared, by name. Raises CanvasError if the architecture or the
    preparation of images is not supported.
    """
    if config.get("model_type") != MODEL_TYPE:
        raise CanvasError(
            f"config.json describes a {config.get('model_type')!r} model, not {MODEL_TYPE!r}",
            _UNSUPPORTED_HINT,
        )
    if not isinstance(config.get("text_config"), dict):
        raise CanvasError("config.json has no text_config", _UNSUPPORTED_HINT)
    text = _Fields(config["text_config"], "text_config")
    top = _Fields(config, "config.json")
    vision = config.get("vision_config")
    _refuse_unsupported(text, top, _Fields(vision or {}, "vision_config"))

    model = ModelConfig(
        hidden_size=text.size("hidden_size"),
        intermediate_size=text.size("intermediate_size"),
        moe_intermediate_size=text.size("moe_intermediate_size"),
        num_experts=text.size("num_experts"),
        top_k_experts=text.size("top_k_experts"),
        vocab_size=text.size("vocab_size"),
        num_attention_heads=text.size("num_attention_heads"),
        layers=_layers(text),
        # With a window of one token, the reference fails, because its cache drops no tokens.
        sliding_window=text.size("sliding_window", 512, least=2),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        logit_softcap=text.number("final_logit_softcapping", 30.0),
        canvas_length=top.size("canvas_length", 256),
        max_position_embeddings=text.size("max_position_embeddings", 131_072),
        pad_token_id=text.token("pad_token_id") or 0,
        bos_token_id=text.token("bos_token_id"),
        eos_token_ids=_eos(text, generation),
        image_token_id=top.token("image_token_id") if vision else None,
        boi_token_id=top.token("boi_token_id") if vision else None,
        eoi_token_id=top.token("eoi_token_id") if vision else None,
        vision=vision or None,
    )
    _check(model)
    sampler = _sampler(generation or {})
    _check_preprocessing(preprocessing or {}, vision or {})
    return model, sampler


def _check_preprocessing(files: Mapping[str, Json], vision: Json) -> None:
    """Raise CanvasError if the checkpoint expects images to be prepared differently than in `runtime/pictures.py`."""
    for name, data in files.items():
        given = _Fields(data.get("image_processor") or data, name)
        given.only("do_resize", True)
        given.only("resample", 3)  # bicubic
        given.only("do_rescale", True)
        given.only("rescale_factor", 1 / 255)
        given.only("max_soft_tokens", SOFT_TOKENS)
        # With mean 0 and deviation 1, normalizing changes nothing, so it is allowed.
        if (given.data.get("image_mean"), given.data.get("image_std")) != ([0] * 3, [1] * 3):
            given.only("do_normalize", False)
        for size in ("patch_size", "pooling_kernel_size"):
            given.only(size, vision.get(size))


def _refuse_unsupported(text: _Fields, top: _Fields, vision: _Fields) -> None:
    """Raise CanvasError for variants of the network that the reference supports but our graphs do not."""
    text.only("hidden_activation", "gelu_pytorch_tanh")
    text.only("attention_bias", False)
    text.only("tie_word_embeddings", True)
    top.only("tie_word_embeddings", True)
    # The reference merges these two fields into rope_parameters.
    text.only("rope_scaling", None)
    text.only("partial_rotary_factor", None)
    text.only("use_bidirectional_attention", None, "vision")
    if vision.data:
        vision.only("hidden_activation", "gelu_pytorch_tanh")
        if text.data.get("use_bidirectional_attention") is None:
            raise CanvasError(
                "text_config: without use_bidirectional_attention, an image's tokens would not attend to"
                " later tokens of the image, which is not supported",
                _UNSUPPORTED_HINT,
            )


def _layers(text: _Fields) -> tuple[Layer, ...]:
    count = text.size("num_hidden_layers")
    kinds = text.data.get("layer_types")
    if kinds is None:
        kinds = [
            "sliding_attention" if (i + 1) % FULL_EVERY else "full_attention" for i in range(count)
        ]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise CanvasError(
            f"text_config.layer_types does not list {count} layers, as num_hidden_layers says",
            "fetch the checkpoint again: its config.json is damaged",
        )
    kinds = [
        *kinds[:-1],
        "full_attention",
    ]  # as in the reference, where the last layer is always full
    return tuple(_layer(text, i, kind) for i, kind in enumerate(kinds))


def _layer(text: _Fields, index: int, kind: str) -> Layer:
    if kind not in _ROPE_DEFAULTS:
        raise CanvasError(f"layer {index} has unknown attention {kind!r}", _UNSUPPORTED_HINT)
    head_dim, num_kv_heads = _attention_sizes(text, index, kind)
    known = _ROPE_DEFAULTS[kind]
    rope = (text.data.get("rope_parameters") or _ROPE_DEFAULTS).get(kind)
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != known["rope_type"]:
        raise CanvasError(
            f"rope_parameters of {kind} should have rope_type {known['rope_type']!r}: {rope}",
            _UNSUPPORTED_HINT,
        )
    if unknown := sorted(set(rope) - set(known)):
        raise CanvasError(
            f"rope_parameters of {kind} have unsupported fields: {', '.join(unknown)}",
            _UNSUPPORTED_HINT,
        )
    where = _Fields(rope, f"rope_parameters.{kind}")
    return Layer(
        kind="full" if kind == "full_attention" else "sliding",
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        rope_theta=where.number("rope_theta"),
        rope_partial=where.number("partial_rotary_factor", 1.0),
    )


def _attention_sizes(text: _Fields, index: int, kind: str) -> tuple[int, int]:
    """Return a layer's head size and number of KV heads. `per_layer_config` overrides the older global_* fields."""
    head_dim = text.size("head_dim")
    num_kv_heads = text.size("num_key_value_heads")
    if "per_layer_config" not in text.data:
        if kind == "full_attention":
            head_dim = text.size("global_head_dim", _DEFAULT_GLOBAL_HEAD_DIM)
            num_kv_heads = text.size("num_global_key_value_heads", num_kv_heads)
        return head_dim, num_kv_heads
    # From eleven layers on, transformers writes the layers' numbers with leading zeros.
    overrides = (text.data["per_layer_config"] or {}).items()
    override = {str(key).lstrip("0") or "0": each for key, each in overrides}.get(str(index)) or {}
    unknown = sorted(set(override) - {"head_dim", "num_key_value_heads"})
    if unknown:
        raise CanvasError(
            f"text_config.per_layer_config overrides {', '.join(unknown)} in layer {index}",
            _UNSUPPORTED_HINT,
        )
    where = _Fields(override, f"per_layer_config.{index}")
    return where.size("head_dim", head_dim), where.size("num_key_value_heads", num_kv_heads)


def _eos(text: _Fields, generation: Json | None) -> tuple[int, ...]:
    """Return the end-of-sequence tokens.

    The reference uses only the ids in generation_config.json. If that file is missing, we use the ids in config.json.
    """
    value = text.data.get("eos_token_id") if generation is None else generation.get("eos_token_id")
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(_is_int(item) for item in values):
        raise CanvasError(
            f"eos_token_id is not a token id or a list of token ids: {value!r}",
            "fetch generation_config.json and config.json again",
        )
    return tuple(values)


def _sampler(generation: Json) -> SamplerDefaults:
    sampler = generation.get("sampler_config") or {}
    _Fields(sampler, "sampler_config").only("_cls_name", "EntropyBoundSamplerConfig")
    given = dict(generation)
    if sampler.get("entropy_bound") is not None:
        given["entropy_bound"] = sampler["entropy_bound"]
    where = _Fields(
        {name: value for name, value in given.items() if value is not None},
        "generation_config.json",
    )
    found: Json = {
        name: where.size(name, default, least=int(name != "stability_threshold"))
        if isinstance(default, int)
        else where.number(name, default)
        for name, default in asdict(SamplerDefaults()).items()
    }
    return SamplerDefaults(**found)


def _check(model: ModelConfig) -> None:
    problems = []
    if model.top_k_experts > model.num_experts:
        problems.append(f"top_k_experts {model.top_k_experts} of {model.num_experts} experts")
    for i, layer in enumerate(model.layers):
        if model.num_attention_heads % layer.num_kv_heads:
            problems.append(
                f"layer {i}: {model.num_attention_heads} query heads do not share"
                f" {layer.num_kv_heads} KV heads evenly"
            )
    if len(set(model.layers)) > len({layer.kind for layer in model.layers}):
        problems.append("layers with the same kind of attention differ")
    if model.vision is not None and model.image_token_id is None:
        problems.append("vision_config without an image_token_id")
    if problems:
        raise CanvasError(
            "config.json contradicts itself: " + "; ".join(problems),
            "fetch the checkpoint again: its config.json is damaged",
        )


@dataclass(frozen=True)
class _Fields:
    """A JSON object whose fields are checked as they are read."""

    data: Mapping[str, Any]
    where: str

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.data.get(name, default)
        if value is None:
            value = default
        if not _is_int(value) or value < least:
            raise self._wrong(name, f"an integer of at least {least}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise self._wrong(name, "a number that is not negative")
        return float(value)

    def token(self, name: str) -> int | None:
        value = self.data.get(name)
        if value is not None and (not _is_int(value) or value < 0):
            raise self._wrong(name, "a token id")
        return value

    def only(self, name: str, default: object, *others: object) -> None:
        """Accept the reference's `default`, `others`, and a missing field. Raise CanvasError for any other value."""
        value = self.data.get(name, default)
        if value not in (default, *others):
            raise CanvasError(f"{self.where}: {name} {value!r} is not supported", _UNSUPPORTED_HINT)

    def _wrong(self, name: str, wanted: str) -> CanvasError:
        found = repr(self.data[name]) if name in self.data else "missing"
        return CanvasError(
            f"{self.where}: {name} should be {wanted}, not {found}",
            "check that this is a complete DiffusionGemma checkpoint in the Hugging Face layout",
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _known_fields(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in data.items() if name in names}
