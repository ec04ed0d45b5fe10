"""Reading checkpoints: shards, aliases, and errors for incomplete checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DiffusionGemmaForBlockDiffusion

from canvasrt.checkpoints.description import describe
from canvasrt.checkpoints.locate import find_checkpoint
from canvasrt.errors import CanvasError
from canvasrt.export.checkpoint import Checkpoint
from canvasrt.export.graphs import export_graphs
from canvasrt.export.segments import SegmentModule, segments
from canvasrt.export.weights import _LIMITS, Weight, weights
from tests.helpers import library
from tests.helpers.quantized_checkpoints import SMALL, edit
from tests.helpers.random_models import random_model


@pytest.fixture
def saved() -> Path:
    """A small checkpoint in one file."""
    return library.checkpoint("as-plain")


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, which tests damage."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def test_shards_read_like_one_file(saved: Path, tmp_path: Path) -> None:
    whole = Checkpoint(saved)
    random_model(SMALL).save_pretrained(tmp_path, max_shard_size="200KB")
    sharded = Checkpoint(tmp_path)
    assert len([*tmp_path.glob("*.safetensors")]) > 3
    config = describe(saved).model
    for segment in segments(config):
        for weight in weights(segment.module, segment.sources, whole):
            for part in weight.parts:
                assert torch.equal(whole.read(part), sharded.read(part))


def test_one_file_overrides_the_shards_of_an_earlier_save(copy: Path) -> None:
    """transformers also reads the single file. If it saves one into the folder of a sharded checkpoint, it leaves the
    old index."""
    name = "model.decoder.norm.weight"
    random_model(SMALL).save_pretrained(copy / "shards", max_shard_size="200KB")
    for file in (copy / "shards").iterdir():
        if file.name.startswith("model"):
            file.rename(copy / file.name)
    edit(copy, lambda tensors: tensors[name].neg_())
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(copy)
    assert torch.equal(Checkpoint(find_checkpoint(copy)).read(name), model.state_dict()[name])
    shard = next(copy.glob("model-00001-of-*"))
    os.truncate(shard, 100)
    assert name in describe(copy).tensors
    shard.unlink()
    assert Checkpoint(find_checkpoint(copy)).file(name).name == "model.safetensors"


def test_weights_are_placeholders_until_they_are_read(saved: Path) -> None:
    config = describe(saved).model
    head = segments(config)[-2]
    table = head.module.get_parameter("table")
    assert table.untyped_storage().nbytes() == table.element_size()
    read = {each.name: each for each in weights(head.module, head.sources, Checkpoint(saved))}
    found = torch.cat(list(read["table"].read(table.dtype)))
    expected = load_file(saved / "model.safetensors")["model.decoder.embed_tokens.weight"]
    assert torch.equal(found, expected)


def test_tied_weights_under_the_encoders_name(saved: Path, copy: Path) -> None:
    def move(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.startswith("model.decoder.layers.") and not name.endswith("layer_scalar"):
                alias = name.replace("model.decoder.", "model.encoder.language_model.")
                tensors[alias] = tensors.pop(name)

    edit(copy, move)
    name = "model.decoder.layers.0.self_attn.q_proj.weight"
    assert torch.equal(Checkpoint(copy).read(name), Checkpoint(saved).read(name))


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("model.decoder.embed_tokens.weight", "lm_head.weight"),
        (
            "model.decoder.layers.1.experts.down_proj",
            "model.encoder.language_model.layers.1.experts.down_proj",
        ),
    ],
)
def test_two_copies_of_a_tied_weight_must_be_equal(
    copy: Path, tmp_path: Path, name: str, alias: str
) -> None:
    """If the copies differ, transformers does not tie them."""
    edit(copy, lambda tensors: tensors.update({alias: tensors[name].clone()}))
    Checkpoint(copy).check_tied()
    edit(copy, lambda tensors: tensors[alias][-1].neg_())
    with pytest.raises(CanvasError, match=rf"{name} and {alias} .* differ"):
        export_graphs(copy, tmp_path / "out")


def test_layer_scalars_are_not_tied(copy: Path) -> None:
    edit(copy, lambda tensors: tensors.pop("model.decoder.layers.0.layer_scalar") and None)
    with pytest.raises(CanvasError, match=r"no tensor model\.decoder\.layers\.0\.layer_scalar"):
        Checkpoint(copy).read("model.decoder.layers.0.layer_scalar")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.decoder.norm.weight"), "no tensor model.decoder.norm.weight"),
        (
            lambda t: t.update({"model.decoder.norm.weight": torch.ones(7)}),
            r"norm.weight .* has shape \(7,\), but config.json asks for \(128,\)",
        ),
        (
            lambda t: t.update({"model.decoder.layers.0.mlp.up_proj.weight": torch.ones(9, 128)}),
            "has 265 rows, but config.json asks for 512 rows",
        ),
    ],
)
def test_weights_that_disagree_leave_nothing(
    copy: Path, tmp_path: Path, change: Callable[[dict], None], message: str
) -> None:
    edit(copy, change)
    with pytest.raises(CanvasError, match=message):
        export_graphs(copy, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}


@pytest.mark.parametrize(
    "name",
    [
        "model.decoder.layers.1.input_layernorm.weight",
        "model.encoder.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight",
    ],
)
def test_numbers_that_are_not_finite(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Small weights are checked before the first graph is traced."""
    edit(copy, lambda t: t[name].view(-1)[3:4].fill_(float("nan")))
    monkeypatch.setattr(SegmentModule, "trace", lambda *_: pytest.fail("traced"))
    said = rf"{name} in .*model\.safetensors contains numbers that are not finite"
    with pytest.raises(CanvasError, match=said):
        export_graphs(copy, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}


def test_a_product_without_limits_has_infinite_ones(copy: Path) -> None:
    def limit(tensors: dict[str, torch.Tensor]) -> None:
        for name, value in zip(_LIMITS, (-torch.inf, torch.inf, -1.0, torch.nan), strict=True):
            tensors[name] = torch.tensor(value)

    edit(copy, limit)
    *fine, broken = (Weight("x", (1,), (name,), Checkpoint(copy)) for name in _LIMITS)
    for each in fine:
        list(each.read(torch.float32))
    with pytest.raises(CanvasError, match="output_max in"):
        list(broken.read(torch.float32))


@pytest.mark.acceptance
def test_exports_are_reproducible(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two exports are identical, even without the cache of traced graphs."""
    first = export_graphs(saved, tmp_path / "a")
    monkeypatch.setenv("CANVASRT_CACHE", str(tmp_path / "cache"))
    second = export_graphs(saved, tmp_path / "b")
    assert first.manifest.data == second.manifest.data
