"""LoRA adapters are merged as PEFT merges them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from canvasrt.build.options import BuildOptions
from canvasrt.cli.options import adapters as parse
from canvasrt.errors import CanvasError, UsageError
from canvasrt.export.graphs import export_graphs
from canvasrt.export.lora import Adapted, load_adapter
from canvasrt.pipeline import plan_all
from canvasrt.targets import parse_targets
from tests.helpers import library
from tests.helpers.graph_weights import weights_of
from tests.helpers.quantized_checkpoints import SMALL, without_vision
from tests.helpers.random_models import random_model

BOTH = r"model\.(encoder\.language_model|decoder)\.layers.*"
DECODER = r"model\.decoder\.layers.*"

CONFIGS: dict[str, dict[str, Any]] = {
    # Settings of NeMo AutoModel's recipe for this model.
    "attention and mlp": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": DECODER + r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    },
    # PEFT creates an adapter for the encoder and another for the decoder, although their weights are tied.
    "both stacks, rslora": {
        "r": 4,
        "lora_alpha": 12,
        "use_rslora": True,
        "target_modules": BOTH + r"(q_proj|o_proj|router\.proj)",
    },
    "patterns": {
        "r": 4,
        "target_modules": DECODER + r"self_attn\.(q_proj|o_proj)",
        "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 2, "o_proj": 6},
        "alpha_pattern": {"o_proj": 3},
    },
    "experts": {
        "r": 2,
        "target_modules": [],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "alpha_pattern": {"experts.down_proj": 5},
    },
    "experts' down alone": {
        "r": 2,
        "target_modules": [],
        "target_parameters": ["decoder.layers.1.experts.down_proj"],
    },
    "self-conditioning and vision": {
        "r": 3,
        "target_modules": r".*(self_conditioning\.gate_proj|vision_tower.*k_proj\.linear)",
    },
}


@pytest.fixture
def base() -> Path:
    return library.checkpoint("as-plain")


def adapter(folder: Path, seed: int = 0, model: Any = None, **config: Any) -> Path:
    """Write an adapter with PEFT, with random numbers instead of trained ones."""
    torch.manual_seed(seed)
    peft = get_peft_model(model or random_model(SMALL), LoraConfig(**config))
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    peft.save_pretrained(folder)
    return folder


def merged(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.merge_and_unload().state_dict())


def assert_merged(checkpoint: Adapted, base: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    """Check that every tensor equals the merged model's, and that some tensors have changed."""
    changed = 0
    for name, before in load_file(base / "model.safetensors").items():
        found = checkpoint.read(name)
        torch.testing.assert_close(found, wanted[name], rtol=1e-5, atol=1e-6)
        changed += not torch.equal(found, before)
    assert changed


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_as_peft_merges(base: Path, tmp_path: Path, name: str) -> None:
    folder = adapter(tmp_path / "adapter", **CONFIGS[name])
    wanted = merged(PeftModel.from_pretrained(random_model(SMALL), folder))
    assert_merged(Adapted(base, [load_adapter(folder)]), base, wanted)


def test_several_with_weights(base: Path, tmp_path: Path) -> None:
    """Compares with PEFT's exact way ("cat") to combine weighted adapters."""
    config = CONFIGS["attention and mlp"]
    one, two = (adapter(tmp_path / str(seed), seed, **config) for seed in (1, 2))
    model = PeftModel.from_pretrained(random_model(SMALL), one, adapter_name="one")
    model.load_adapter(two, adapter_name="two")
    model.add_weighted_adapter(["one", "two"], [0.5, 1.5], "sum", combination_type="cat")
    model.set_adapter("sum")
    found = Adapted(base, [load_adapter(one, 0.5), load_adapter(two, 1.5)])
    assert_merged(found, base, merged(model))


def test_names_of_a_single_stack(base: Path, tmp_path: Path) -> None:
    """Tools that do not distinguish encoder and decoder write names that begin with `model.layers`."""
    folder = adapter(tmp_path / "adapter", **CONFIGS["attention and mlp"])
    wanted = merged(PeftModel.from_pretrained(random_model(SMALL), folder))
    file = folder / "adapter_model.safetensors"
    save_file({k.replace("model.decoder.", "model."): v for k, v in load_file(file).items()}, file)
    assert_merged(Adapted(base, [load_adapter(folder)]), base, wanted)


def test_graphs_hold_the_merged_weights(base: Path, tmp_path: Path) -> None:
    text = Path(shutil.copytree(base, tmp_path / "text"))
    without_vision(text)
    folder = adapter(tmp_path / "adapter", **CONFIGS["experts"])
    wanted = merged(PeftModel.from_pretrained(random_model(SMALL), folder))
    bundle = export_graphs(text, tmp_path / "graphs", adapters=[(folder, 1.0)])
    found = torch.from_numpy(weights_of(bundle)["layers.1.experts.down"].copy())
    torch.testing.assert_close(
        found, wanted["model.decoder.layers.1.experts.down_proj"], rtol=1e-5, atol=1e-6
    )
    (said,) = bundle.manifest.made_from["adapters"]
    assert said["weight"] == 1.0
    assert set(said["files"]) == {"adapter_config.json", "adapter_model.safetensors"}


def test_another_base_model(base: Path, tmp_path: Path) -> None:
    wider = random_model({**SMALL, "hidden_size": 160})
    folder = adapter(tmp_path / "adapter", model=wider, **CONFIGS["attention and mlp"])
    with pytest.raises(CanvasError, match=r"for a base model .* has shape \(128, 256\)"):
        Adapted(base, [load_adapter(folder)])
    longer = random_model(
        {"num_hidden_layers": 3, "layer_types": [*SMALL["layer_types"], "full_attention"]}
    )
    folder = adapter(tmp_path / "longer", model=longer, **CONFIGS["attention and mlp"])
    with pytest.raises(CanvasError, match=r"for a base model .* has no .*layers\.2\."):
        Adapted(base, [load_adapter(folder)])


@pytest.mark.parametrize(("number", "blamed"), [(1e-30, "base"), (1e25, "adapter")])
def test_numbers_that_overflow_name_their_file(
    number: float, blamed: str, base: Path, tmp_path: Path
) -> None:
    folder = adapter(tmp_path / "adapter", r=2, target_modules=DECODER + r"self_attn\.q_proj")
    file, name = (
        folder / "adapter_model.safetensors",
        "model.decoder.layers.0.self_attn.q_proj.weight",
    )
    save_file({k: torch.full_like(v, number) for k, v in load_file(file).items()}, file)
    checkpoint = Path(shutil.copytree(base, tmp_path / "base")) / "model.safetensors"
    weights = load_file(checkpoint)
    if blamed == "base":
        weights[name][0] = float("inf")
    save_file(weights, checkpoint, {"format": "pt"})
    with pytest.raises(CanvasError, match=rf"in {tmp_path / blamed}.* not finite"):
        Adapted(tmp_path / "base", [load_adapter(folder)]).read(name)


def test_embeddings_are_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", r=2, target_modules=["lm_head"])
    with pytest.raises(CanvasError, match="the embedding table cannot be adapted"):
        load_adapter(folder)


def _configure(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _drop(folder: Path, ending: str) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if not k.endswith(ending)}, file)


def _break(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({k: v / 0 for k, v in load_file(file).items()}, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "is not an adapter"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "is not JSON"),
        (lambda folder: _configure(folder, peft_type="IA3"), "'IA3' adapter"),
        (lambda folder: _configure(folder, use_dora=True), "DoRA"),
        (lambda folder: _configure(folder, init_lora_weights="pissa"), "changed by 'pissa'"),
        (lambda folder: _configure(folder, modules_to_save=["norm"]), "modules saved whole"),
        (lambda folder: _configure(folder, lora_bias=True), "LoRA with a bias"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model"),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"short"),
            "not a complete safetensors file",
        ),
        (
            lambda folder: _drop(folder, "layers.0.self_attn.q_proj.lora_B.weight"),
            "has no .*lora_B",
        ),
        (lambda folder: _drop(folder, "layers.0.self_attn.q_proj.lora_A.weight"), "without its"),
        (lambda folder: _break(folder), r"lora_.* in .*adapter_model.* not finite"),
    ],
)
def test_damaged_adapters_and_other_kinds_are_refused(
    tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    folder = adapter(tmp_path / "a", r=2, target_modules=DECODER + r"self_attn\.q_proj")
    change(folder)
    with pytest.raises(CanvasError, match=message):
        load_adapter(folder)


def test_not_into_codes(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = Path(shutil.copytree(base, tmp_path / "checkpoint"))
    settings = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (quantized / "hf_quant_config.json").write_text(json.dumps(settings))
    folder = adapter(tmp_path / "a", r=2, target_modules=DECODER + r"self_attn\.q_proj")
    with pytest.raises(CanvasError, match="but adapters need plain weights"):
        export_graphs(quantized, tmp_path / "graphs", adapters=[(folder, 1.0)])
    monkeypatch.setattr("canvasrt.pipeline.hash_source", lambda *_: pytest.fail("hashed"))
    wanted = BuildOptions(adapters=((folder, 1.0),))
    with pytest.raises(CanvasError, match="but adapters need plain weights"):
        plan_all(quantized, parse_targets("rtx-5090"), tmp_path / "out", wanted, check=False)


def test_the_option(tmp_path: Path) -> None:
    odd = tmp_path / "a=1"
    odd.mkdir()
    assert parse(["x", "y=0.25", str(odd)]) == [(Path("x"), 1), (Path("y"), 0.25), (odd, 1)]
    with pytest.raises(UsageError, match="'half' is not a finite number"):
        parse(["x=half"])
