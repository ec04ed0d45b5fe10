"""Writes a package: engines, Triton's model repository, and all that `docker build` needs."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from canvasrt.bundle import Bundle, HashProgress, Manifest, load_bundle, staging, write_manifest
from canvasrt.containers.leftovers import run_name
from canvasrt.containers.tensors import STREAM_MODEL
from canvasrt.containers.triton import write_repository
from canvasrt.containers.wheel import write_wheel
from canvasrt.errors import CanvasError
from canvasrt.extras import version

ENGINES = "engines"
REPOSITORY = "models"
FORMATS = ("context", "oci", "docker")
_TEMPLATES = Path(__file__).parent / "templates"
# What the code in the container imports, with the versions that are installed here.
_REQUIRED = ("jinja2", "numpy", "rich", "tokenizers", "typer", "huggingface-hub")
_RUNTIMES = ("onnxruntime-gpu", "onnxruntime")


def package(
    source: Path | str,
    out: Path | str,
    *,
    format: str = "context",
    max_batch: int | None = None,
    progress: HashProgress | None = None,
) -> Bundle:
    """Writes the package of the engine bundle `source` to `out`.

    `max_batch` canvases are denoised at once; None takes the engines' own limit. CanvasError for a
    damaged bundle, an unknown format, and an `out` that is not empty; nothing is left behind then.
    """
    _check_format(format)
    engines = load_bundle(source, kind=("engines", "graphs"), progress=progress)
    with staging(Path(out)) as folder:
        _copy(engines, folder / ENGINES)
        write_repository(folder / REPOSITORY, f"../{ENGINES}", max_batch=max_batch)
        write_wheel(folder / "wheels")
        (folder / "requirements.txt").write_text(_requirements())
        shutil.copyfile(_TEMPLATES / "Dockerfile", folder / "Dockerfile")
        manifest = _write_manifest(folder, engines.manifest, {"max_batch": max_batch})
    return Bundle(Path(out), manifest)


@contextlib.contextmanager
def repository_of(bundle: Bundle) -> Iterator[Path]:
    """The model repository that serves a bundle, for as long as the block runs.

    The Python backend writes compiled files beside the models and heeds no setting against it: so a
    package's own repository is copied where it can be written to.
    """
    root = bundle.path.resolve()
    packaged = bundle.manifest.kind == "package"
    if packaged and not os.access(root / REPOSITORY / STREAM_MODEL / "1", os.W_OK):
        yield root / REPOSITORY
        return
    with tempfile.TemporaryDirectory(prefix=run_name()) as scratch:
        folder = Path(scratch)
        if packaged:
            shutil.copytree(root / REPOSITORY, folder / REPOSITORY)
        else:
            write_repository(folder / REPOSITORY, f"../{ENGINES}")
        (folder / ENGINES).symlink_to(root / ENGINES if packaged else root)
        yield folder / REPOSITORY


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise CanvasError(f"unknown format {format!r}", f"the formats are {', '.join(FORMATS)}")
    if format != "context":
        raise CanvasError(
            f"the format {format} cannot be written yet",
            "use --format context, and run `docker build` on the folder",
        )


def _copy(bundle: Bundle, out: Path) -> None:
    """Hard links where the disk allows: engines are large, and bundles are never changed."""
    for name in (*bundle.manifest.files, "manifest.json"):
        source, target = bundle.path / name, out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        linked = False
        with contextlib.suppress(OSError):
            os.link(source.resolve(), target)
            linked = True
        if not linked:
            shutil.copyfile(source, target)


def _requirements() -> str:
    runtimes = [name for name in _RUNTIMES if version(name)]
    lines = [f"{name}=={version(name)}" for name in (*_REQUIRED, *runtimes[:1]) if version(name)]
    return "\n".join(sorted(lines)) + "\n"


def _write_manifest(folder: Path, engines: Manifest, options: Mapping[str, Any]) -> Manifest:
    """The engines' description, with its files where they lie now."""

    def moved(entry: Mapping[str, Any]) -> dict[str, Any]:
        return {**entry, "file": f"{ENGINES}/{entry['file']}"}

    return write_manifest(
        folder,
        kind="package",
        made_from={ENGINES: engines.digest},
        options={**engines.options, **{k: v for k, v in options.items() if v is not None}},
        model=engines.model,
        sampler=engines.sampler,
        segments=[moved(entry) for entry in engines.segments],
        embedding=moved(engines.embedding) if engines.embedding else None,
        tokenizer=[f"{ENGINES}/{name}" for name in engines.tokenizer or ()] or None,
        target=engines.target,
        packages=_RUNTIMES,
        known={f"{ENGINES}/{name}": entry for name, entry in engines.files.items()},
    )
