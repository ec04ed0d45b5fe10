"""Resolves a CHECKPOINT argument (a folder, a hub name, or the name of a bundled checkpoint), and reads its small files."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from canvasrt.defaults import ADAPTER_FILES
from canvasrt.errors import CanvasError
from canvasrt.hashes import hash_files
from canvasrt.types import Json

DEMO = "demo"
# Name of a bundled checkpoint → its folder next to the demo's code.
BUNDLED = {DEMO: "checkpoint", "demo-vision": "checkpoint-vision"}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION, MODELOPT = "config.json", "generation_config.json", "hf_quant_config.json"
PREPROCESSING = ("preprocessor_config.json", "processor_config.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
# The folder of the demo's checkpoints and prompts.
DEMO_FOLDER = Path(__file__).parents[1] / "demo"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*"]


def demo_checkpoint(name: str = DEMO) -> Path:
    """Return a bundled checkpoint's folder inside the installed package."""
    return DEMO_FOLDER / BUNDLED[name]


def find_checkpoint(name: str | Path) -> Path:
    """Return the local folder of a checkpoint. A hub name (`owner/model[@revision]`) is downloaded first.

    Raises CanvasError if there is no such checkpoint, or if its weights are incomplete.
    """
    path = _locate(str(name))
    check_weights(path)
    return path


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form of a hub name: `owner/model`, optionally with `@revision`."""
    return bool(_HUB_NAME.fullmatch(name))


def _locate(name: str) -> Path:
    path = Path(name).expanduser()
    if name in BUNDLED and not (path / CONFIG).exists():
        return demo_checkpoint(name)
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise CanvasError(
            f"{name} is a file; a checkpoint is a folder",
            "name the folder that holds config.json and *.safetensors",
        )
    if is_hub_name(name):
        return _fetch(name)
    raise CanvasError(
        f"no checkpoint at {name}",
        "name a folder in the Hugging Face layout, a hub name such as"
        " google/diffusiongemma-26B-A4B-it, `demo` or `demo-vision`",
    )


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        found = snapshot_download(repository, revision=revision or None, allow_patterns=_HUB_FILES)
    except Exception as error:  # the hub's client has many types of error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CanvasError(
            f"{name} is not a folder here, and the hub did not provide it: {reason}",
            "check the name and the network, set HF_TOKEN for a gated model,"
            " or name the checkpoint's folder",
        ) from error
    return Path(found)


def check_weights(folder: Path) -> None:
    """Raise CanvasError if the checkpoint has no weights, or if one of their files is truncated or missing."""
    index = read_index(folder)
    if index is None:
        files = _unlisted(folder)
    else:
        files = [folder / name for name in sorted(set(index.values()))]
    if not files:
        raise CanvasError(
            f"{folder} has no *.safetensors",
            "a checkpoint is a folder in the Hugging Face layout:"
            " config.json, *.safetensors and the tokenizer's files",
        )
    for path in files:
        _check_safetensors(path)


@dataclass(frozen=True)
class CheckpointFiles:
    """What the small files in a checkpoint's `folder` say: the objects in its JSON files, and the names of its tensors.

    `generation` is generation_config.json and `modelopt` is hf_quant_config.json; each is None if the file is missing.
    `preprocessing` has the objects in the files that say how to prepare images, by file name; it is empty for a model
    without a vision tower.
    """

    folder: Path
    config: Json
    generation: Json | None = None
    modelopt: Json | None = None
    preprocessing: Mapping[str, Json] = field(default_factory=dict)
    tensors: frozenset[str] = frozenset()


def read_files(folder: Path) -> CheckpointFiles:
    """Read a checkpoint's small files. Raises CanvasError if a file is damaged or config.json is missing."""
    modelopt = _read_if_there(folder / MODELOPT)
    config = read_json(folder / CONFIG)
    generation = _read_if_there(folder / GENERATION)
    images = PREPROCESSING if config.get("vision_config") else ()
    found = {name: _read_if_there(folder / name) for name in images}
    preprocessing = {name: data for name, data in found.items() if data is not None}
    index = read_index(folder)
    tensors = (
        index if index is not None else set().union(*map(_check_safetensors, _unlisted(folder)))
    )
    return CheckpointFiles(folder, config, generation, modelopt, preprocessing, frozenset(tensors))


def _read_if_there(file: Path) -> Json | None:
    return read_json(file) if file.exists() else None


def read_index(folder: Path) -> dict[str, str] | None:
    """Return tensor name → file name for a sharded checkpoint; None if all weights are in model.safetensors.

    If that file exists but the index does not name it, an earlier save left the index behind. As in transformers, such
    an index is ignored.

    Raises CanvasError if the index is damaged, or if it names a file that is not a `*.safetensors` in the same folder,
    because the fingerprint would not cover that file.
    """
    index = folder / INDEX
    if not index.is_file():
        return None
    try:
        weights = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as cause:
        raise CanvasError(f"{index} is damaged: {cause}", "fetch the file again") from cause
    for name in weights.values():
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise CanvasError(
                f"{index} names {name!r}, which is outside the checkpoint's folder",
                "shards must be next to their index: fetch the checkpoint again, from a source that you trust",
            )
        if not name.endswith(".safetensors"):
            raise CanvasError(
                f"{index} names {name!r}, which is not a *.safetensors file",
                "save the checkpoint again as safetensors",
            )
    is_left_behind = SINGLE not in weights.values() and (folder / SINGLE).is_file()
    return None if is_left_behind else weights


def check_adapter(folder: Path) -> None:
    """Raise CanvasError if a folder contains no LoRA adapter."""
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            raise CanvasError(
                f"{folder} is not an adapter: it has no {name}",
                "name a folder that PEFT's save_pretrained() wrote",
            )


def _unlisted(folder: Path) -> list[Path]:
    """Return the weights' files of a checkpoint that has no index."""
    single = folder / SINGLE
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _check_safetensors(path: Path) -> set[str]:
    """Return the names of a file's tensors. Raises CanvasError if the file's size contradicts its header."""
    again = "fetch it again (`huggingface-cli download` fetches only what is missing)"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            (length,) = struct.unpack("<Q", prefix)
            if length > size - 8:
                raise ValueError("truncated header")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except FileNotFoundError:
        raise CanvasError(
            f"{path} is missing, but the checkpoint's index lists it", again
        ) from None
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise CanvasError(f"{path} is truncated, or not a safetensors file", again) from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise CanvasError(f"{path} has {size} bytes; its header says {expected}", again)
    return header.keys() - {"__metadata__"}


def fingerprint(folder: Path, hasher: Callable[..., dict[str, str]] = hash_files) -> dict[str, str]:
    """Return file name → SHA-256 for each file of a checkpoint that affects bundles made from it.

    `hasher` works like `hash_files`.
    """
    found = (path for pattern in _HUB_FILES for path in folder.glob(pattern))
    names = [path.name for path in found if not path.is_dir()]
    names += (read_index(folder) or {}).values()
    return hasher(folder, sorted(set(names)), "hashing the checkpoint")


def read_json(path: Path) -> Json:
    """Return the object in a JSON file. Raises CanvasError if the file is missing or contains no JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CanvasError(
            f"{path.parent} has no {path.name}",
            "a checkpoint is a folder in the Hugging Face layout:"
            " config.json, *.safetensors and the tokenizer's files",
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CanvasError(f"{path} is not JSON: {error}", "fetch the file again") from None
    if not isinstance(data, dict):
        raise CanvasError(f"{path} does not hold a JSON object", "fetch the file again")
    return data
