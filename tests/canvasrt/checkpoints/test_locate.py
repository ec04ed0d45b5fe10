"""Finding a checkpoint, and detecting incomplete weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from canvasrt.checkpoints import locate as checkpoints
from canvasrt.errors import CanvasError


def test_a_folder_is_taken_as_it_is(checkpoint_files: Path) -> None:
    assert checkpoints.find_checkpoint(checkpoint_files) == checkpoint_files.resolve()


@pytest.mark.parametrize("name", checkpoints.BUNDLED)
def test_demos_are_checkpoints_inside_the_package(name: str) -> None:
    folder = checkpoints.find_checkpoint(name)
    assert (folder / "config.json").is_file()
    assert folder.parent.name == "demo"
    tower = json.loads((folder / "config.json").read_text())["vision_config"]
    assert (tower["num_hidden_layers"] > 1) == (name == "demo-vision")


def test_a_folder_of_a_demo_s_name_comes_first(
    checkpoint_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoint_files, tmp_path / "here" / "demo-vision")
    monkeypatch.chdir(tmp_path / "here")
    assert checkpoints.find_checkpoint("demo-vision") == tmp_path / "here" / "demo-vision"


@pytest.mark.parametrize("name", ["nowhere", "./no/where/here", "a/b/c"])
def test_nothing_there(name: str) -> None:
    with pytest.raises(CanvasError, match="no checkpoint at"):
        checkpoints.find_checkpoint(name)


def test_a_hub_name_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CanvasError, match="some/model is not a folder here") as raised:
        checkpoints.find_checkpoint("some/model")
    assert "network" in raised.value.hint


def test_a_file_instead_of_a_folder(checkpoint_files: Path) -> None:
    with pytest.raises(CanvasError, match="is a file"):
        checkpoints.find_checkpoint(checkpoint_files / "config.json")


def test_a_folder_without_weights(checkpoint_files: Path) -> None:
    (checkpoint_files / "model.safetensors").unlink()
    with pytest.raises(CanvasError, match=r"no \*\.safetensors"):
        checkpoints.find_checkpoint(checkpoint_files)


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_truncated_weights(checkpoint_files: Path, keep: int) -> None:
    file = checkpoint_files / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CanvasError, match=r"model\.safetensors"):
        checkpoints.find_checkpoint(checkpoint_files)


def test_a_file_that_the_index_names_and_is_missing(checkpoint_files: Path) -> None:
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    shutil.move(checkpoint_files / "model.safetensors", checkpoint_files / names[0])
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (checkpoint_files / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CanvasError, match=f"{names[1]} is missing"):
        checkpoints.find_checkpoint(checkpoint_files)
    shutil.copy(checkpoint_files / names[0], checkpoint_files / names[1])
    assert checkpoints.find_checkpoint(checkpoint_files) == checkpoint_files


def test_the_fingerprint_follows_every_file_that_matters(checkpoint_files: Path) -> None:
    before = checkpoints.fingerprint(checkpoint_files)
    (checkpoint_files / "tokenizer").mkdir()
    assert set(before) == {"config.json", "generation_config.json", "model.safetensors"}
    (checkpoint_files / "README.md").write_text("unimportant")
    assert checkpoints.fingerprint(checkpoint_files) == before
    (checkpoint_files / "chat_template.jinja").write_text("{{ messages }}")
    assert checkpoints.fingerprint(checkpoint_files) != before


def with_index(folder: Path, *names: object) -> None:
    weights = {str(number): name for number, name in enumerate(names)}
    index = json.dumps({"weight_map": weights})
    (folder / "model.safetensors.index.json").write_text(index)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "sub/inside.safetensors", "{}/outside.safetensors", "..", ""]
)
def test_an_index_names_files_of_its_own_folder_alone(checkpoint_files: Path, name: str) -> None:
    from canvasrt.export.checkpoint import Checkpoint

    outside = checkpoint_files.parent / "outside.safetensors"
    shutil.copy(checkpoint_files / "model.safetensors", outside)
    (checkpoint_files / "sub").mkdir()
    shutil.copy(outside, checkpoint_files / "sub" / "inside.safetensors")
    name = name.format(checkpoint_files.parent)
    with_index(checkpoint_files, "model.safetensors", name)
    for read in (checkpoints.find_checkpoint, Checkpoint, checkpoints.fingerprint):
        with pytest.raises(CanvasError, match="outside the checkpoint's folder") as refused:
            read(checkpoint_files)
        assert repr(name) in str(refused.value)


@pytest.mark.parametrize("name", ["weights.bin", "weights.gguf", ".safetensors/", 7, None])
def test_an_index_names_safetensors_alone(checkpoint_files: Path, name: object) -> None:
    if isinstance(name, str):
        shutil.copy(checkpoint_files / "model.safetensors", checkpoint_files / name.strip("/"))
    with_index(checkpoint_files, "model.safetensors", name)
    with pytest.raises(CanvasError, match=r"index\.json"):
        checkpoints.find_checkpoint(checkpoint_files)


def test_the_fingerprint_covers_what_the_index_names(checkpoint_files: Path) -> None:
    names = [".hidden.safetensors", "model-1.safetensors"]
    for name in names:
        shutil.copy(checkpoint_files / "model.safetensors", checkpoint_files / name)
    (checkpoint_files / "model.safetensors").unlink()
    with_index(checkpoint_files, *names)
    assert set(names) <= checkpoints.fingerprint(checkpoint_files).keys()


def test_links_of_the_hub_s_cache_are_followed(checkpoint_files: Path) -> None:
    """The files of a snapshot are links to blobs in another folder. Links are allowed; only file names are
    restricted."""
    blob = checkpoint_files.parent / "blob"
    (checkpoint_files / "model.safetensors").rename(blob)
    (checkpoint_files / "model.safetensors").symlink_to(blob)
    with_index(checkpoint_files, "model.safetensors")
    assert checkpoints.find_checkpoint(checkpoint_files)
    before = checkpoints.fingerprint(checkpoint_files)["model.safetensors"]
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x01")
    assert checkpoints.fingerprint(checkpoint_files)["model.safetensors"] != before
