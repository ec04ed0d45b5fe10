"""Where a CHECKPOINT argument points: a folder, a hub name, or the word `demo`."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

from canvasrt.errors import CanvasError
from canvasrt.hashes import HashProgress, hash_files

DEMO = "demo"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*"]


def demo_checkpoint() -> Path:
    """The demo checkpoint inside the installed package."""
    return Path(__file__).parents[1] / "demo" / "checkpoint"


def resolve(name: str | Path) -> Path:
    """The local folder of a checkpoint; a hub name (`owner/model[@revision]`) is fetched first.

    Raises CanvasError when nothing is there, or when the weights are incomplete.
    """
    path = _locate(str(name))
    check_weights(path)
    return path


def _locate(name: str) -> Path:
    path = Path(name).expanduser()
    if name == DEMO and not (path / "config.json").exists():
        return demo_checkpoint()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise CanvasError(
            f"{name} is a file, and a checkpoint is a folder",
            "name the folder that holds config.json and *.safetensors",
        )
    if _HUB_NAME.fullmatch(name):
        return _fetch(name)
    raise CanvasError(
        f"no checkpoint at {name}",
        "name a folder in the Hugging Face layout, a hub name such as"
        " google/diffusiongemma-26B-A4B-it, or `demo`",
    )


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        found = snapshot_download(repository, revision=revision or None, allow_patterns=_HUB_FILES)
    except Exception as error:  # the hub's client raises many kinds; each means: not fetched
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CanvasError(
            f"{name} is no folder here and was not fetched from the hub: {reason}",
            "check the name and the network, set HF_TOKEN for a gated model,"
            " or name a folder with the checkpoint",
        ) from error
    return Path(found)


def check_weights(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files, each whole: a truncated or missing one raises CanvasError."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CanvasError(f"{index} is damaged", "fetch the file again") from None
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CanvasError(
            f"{folder} has no *.safetensors",
            "a checkpoint is a folder in the Hugging Face layout:"
            " config.json, *.safetensors and the tokenizer's files",
        )
    for path in files:
        _check_safetensors(path)
    return files


def _check_safetensors(path: Path) -> None:
    """Compare the size that the header promises with the file's."""
    again = "fetch it again (`huggingface-cli download` resumes what is missing)"
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
            f"{path} is missing, and the checkpoint's index names it", again
        ) from None
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise CanvasError(f"{path} is truncated or no safetensors file", again) from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise CanvasError(f"{path} has {size} bytes where its header says {expected}", again)


def fingerprint(
    folder: Path,
    progress: HashProgress | None = None,
    hasher: Callable[..., dict[str, str]] = hash_files,
) -> dict[str, str]:
    """SHA-256 of each file that shapes what is made from a checkpoint, by its name; `hasher` works as `hash_files`."""
    names = [path.name for pattern in _HUB_FILES for path in folder.glob(pattern)]
    return hasher(folder, sorted(set(names)), progress)
