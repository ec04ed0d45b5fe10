"""Writes a package: engines, Triton's model repository, and all that an image is made from."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from canvasrt.bundle import Bundle, Manifest, load_bundle, write_manifest
from canvasrt.containers.names import ENGINES, IMAGE, REPOSITORY
from canvasrt.containers.package import releases, wheels
from canvasrt.containers.package.bindings import DISTRIBUTION
from canvasrt.containers.package.chart import CHART, write_chart
from canvasrt.containers.package.render import render
from canvasrt.containers.package.repository import write_repository
from canvasrt.containers.package.requirements import Pin, requirements
from canvasrt.containers.package.sbom import SBOM, write_sbom
from canvasrt.containers.package.settings import architecture_of, settings_for, target_name
from canvasrt.containers.package.wheel import write_wheel
from canvasrt.containers.processes import run_name
from canvasrt.containers.tensors import STREAM_MODEL
from canvasrt.errors import CanvasError, UsageError
from canvasrt.hashes import HashProgress, hash_files
from canvasrt.staging import link_or_copy, staging
from canvasrt.targets import TARGETS, Target, find_target

_RUNTIMES = ("onnxruntime-gpu", "onnxruntime", "tensorrt-rtx")


@dataclass(frozen=True)
class Recipe:
    """How a package is made. `base` is an image's name; `python` and `tensorrt` are that image's."""

    max_batch: int | None = None
    engines: str = "copy"
    base: str = releases.DEFAULT_BASE
    tag: str = "canvasrt:latest"
    python: str = "3.12"
    tensorrt: str | None = None
    # Whether the package holds the wheels of everything, to build an image without a network.
    wheels: bool = False

    def __post_init__(self) -> None:
        if self.engines not in ("copy", "mount"):
            raise UsageError(f"--engines is {self.engines!r}", "give copy or mount")

    def on(self, base: str, python: str | None = None) -> Recipe:
        """The same on another base, an image with a name; `python` None asks the table of releases."""
        known = releases.python_of_name(base)
        tensorrt = releases.tensorrt_of_name(base)
        return replace(self, base=base, python=python or known or self.python, tensorrt=tensorrt)


def package(
    source: Path | str | Sequence[Path | str],
    out: Path | str,
    *,
    max_batch: int | None = None,
    recipe: Recipe | None = None,
    progress: HashProgress | None = None,
) -> Bundle:
    """Writes the package of one bundle, or of several for different targets, to `out`.

    Bundles are engines, or graphs that the container builds from. `max_batch` canvases are denoised at
    once; None takes the engines' own limit. CanvasError for a damaged bundle, bundles that do not go
    together, engines that the base image cannot load, and an `out` that is not empty; nothing is left
    behind then.
    """
    recipe = recipe or Recipe(max_batch=max_batch).on(releases.DEFAULT_BASE)
    bundles = _load(source, progress)
    manifests = [bundle.manifest for bundle in bundles.values()]
    for manifest in manifests:
        releases.check_engine(manifest.target, recipe.tensorrt, recipe.base)
    architecture = architecture_of(manifests) or "amd64"
    pins = requirements(backends_of(manifests, recipe.tensorrt), recipe.python, architecture)
    with staging(Path(out)) as folder:
        for place, bundle in bundles.items():
            _copy(bundle, folder / place)
        write_repository(folder / REPOSITORY, f"../{ENGINES}", max_batch=recipe.max_batch)
        write_wheel(folder / "wheels")
        for wheel in wheels.fetch(pins, recipe.python, architecture) if recipe.wheels else ():
            shutil.copyfile(wheel, folder / "wheels" / wheel.name)
        (folder / "requirements.txt").write_text("".join(f"{pin}\n" for pin in pins))
        _write_image_part(folder, bundles, recipe, pins)
        _write_texts(folder, bundles, recipe)
        manifest = _write_manifest(folder, bundles, recipe)
    return Bundle(Path(out), manifest)


def backends_of(manifests: Sequence[Manifest], tensorrt: str | None) -> dict[str, str | None]:
    """What runs these bundles, with the version that it must have; `tensorrt` is the base image's.

    Graphs run on ONNX Runtime as they are, or are built by TensorRT on their GPU.
    """
    found: dict[str, str | None] = {}
    for manifest in manifests:
        target = manifest.target
        if target is None:
            on_cpu = manifest.options.get("precision", "fp32") == "fp32"
            name, version = ("onnxruntime", None) if on_cpu else ("tensorrt", tensorrt)
        else:
            name, version = target["backend"], target.get("builder_version")
        if found.setdefault(name, version) != version:
            raise CanvasError(
                f"the bundles need two versions of {name}, {found[name]} and {version}",
                "build them with one version, or make a package of each",
            )
    return found


@contextlib.contextmanager
def repository_of(bundle: Bundle, engines: Path | None = None) -> Iterator[Path]:
    """The model repository that serves a bundle, for as long as the block runs. `engines` are the ones
    to serve, where the bundle does not hold them, or several.

    The Python backend writes compiled files beside the models and heeds no setting against it: so a
    package's own repository is copied where it can be written to.
    """
    root = bundle.path.resolve()
    packaged = bundle.manifest.kind == "package"
    own = root / ENGINES if packaged else root
    chosen = own if engines is None else engines.resolve()
    if (
        packaged
        and chosen == own
        and not os.access(root / REPOSITORY / STREAM_MODEL / "1", os.W_OK)
    ):
        yield root / REPOSITORY
        return
    with tempfile.TemporaryDirectory(prefix=run_name()) as scratch:
        folder = Path(scratch)
        if packaged:
            shutil.copytree(root / REPOSITORY, folder / REPOSITORY)
        else:
            write_repository(folder / REPOSITORY, f"../{ENGINES}")
        (folder / ENGINES).symlink_to(chosen)
        yield folder / REPOSITORY


def _load(
    source: Path | str | Sequence[Path | str], progress: HashProgress | None
) -> dict[str, Bundle]:
    """The bundles by their place in the package: `engines`, or `engines/<target>` for each of several."""
    paths = [source] if isinstance(source, (str, Path)) else list(source)
    if not paths:
        raise UsageError("no bundle was named", "give the folder that `canvasrt build` wrote")
    bundles = [load_bundle(path, kind=("engines", "graphs"), progress=progress) for path in paths]
    if len(bundles) == 1:
        return {ENGINES: bundles[0]}
    placed: dict[str, Bundle] = {}
    for bundle in bundles:
        name = target_name(bundle.manifest)
        if f"{ENGINES}/{name}" in placed:
            raise CanvasError(
                f"two bundles are for {name}", "a package holds one bundle a target: leave one out"
            )
        placed[f"{ENGINES}/{name}"] = bundle
    first = bundles[0]
    for other in bundles[1:]:
        if other.manifest.model != first.manifest.model:
            raise CanvasError(
                f"{other.path} is of another model than {first.path}", "make a package of each"
            )
    hosts = {_host(bundle.manifest) for bundle in bundles} - {"any"}
    if len(hosts) > 1:
        raise CanvasError(
            f"the targets need hosts of two kinds, {' and '.join(sorted(hosts))}, and an image is of one",
            "make a package for each",
        )
    return placed


def _host(manifest: Manifest) -> str:
    return architecture_of([manifest]) or "any"


def _copy(bundle: Bundle, out: Path) -> None:
    """Hard links where the disk allows: engines are large, and bundles are never changed."""
    for name in (*bundle.manifest.files, "manifest.json"):
        link_or_copy(bundle.path / name, out / name)


def _write_image_part(
    folder: Path, bundles: Mapping[str, Bundle], recipe: Recipe, pins: Sequence[Pin]
) -> None:
    """The manifest of what the image gets, and the list of what that is made of."""
    copied = bundles if recipe.engines == "copy" else {}
    known = _known(copied)
    for place in copied:
        name = f"{place}/manifest.json"
        known[name] = _entry(folder, name)
    models = [
        path.relative_to(folder).as_posix()
        for path in sorted((folder / REPOSITORY).rglob("*"))
        if path.is_file()
    ]
    known |= {name: _entry(folder, name) for name in models}
    manifests = [bundle.manifest for bundle in bundles.values()]
    write_sbom(folder / SBOM, manifests, pins, known, recipe.base)
    known[SBOM] = _entry(folder, SBOM)
    (folder / IMAGE).mkdir()
    # The files lie beside the image's manifest only in the image: links stand for them here.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        stand_in = Path(scratch)
        for name in known:
            (stand_in / name).parent.mkdir(parents=True, exist_ok=True)
            (stand_in / name).symlink_to(folder / name)
        _write_manifest(stand_in, copied, recipe, described=bundles, known=known)
        (stand_in / "manifest.json").rename(folder / IMAGE / "manifest.json")


def _entry(folder: Path, name: str) -> dict[str, Any]:
    digest = hash_files(folder, [name])[name]
    return {"sha256": digest, "bytes": (folder / name).stat().st_size}


def _known(bundles: Mapping[str, Bundle]) -> dict[str, dict[str, Any]]:
    """The hashes that the bundles' own manifests hold, which were checked when they were loaded."""
    return {
        f"{place}/{name}": entry
        for place, bundle in bundles.items()
        for name, entry in bundle.manifest.files.items()
    }


def _write_texts(folder: Path, bundles: Mapping[str, Bundle], recipe: Recipe) -> None:
    """Dockerfile, compose file, and the chart, which is for one target: the first."""
    manifests = [bundle.manifest for bundle in bundles.values()]
    backends = backends_of(manifests, recipe.tensorrt)
    facts = {
        "base": recipe.base,
        "tag": recipe.tag,
        "engines": list(bundles) if recipe.engines == "copy" else [],
        "tensorrt": "tensorrt" in backends,
        "tensorrt_version": backends.get("tensorrt") or "",
        "bindings": DISTRIBUTION,
        "settings": settings_for(manifests),
    }
    for (place, target), manifest in zip(_charts(manifests).items(), manifests, strict=True):
        (folder / place).parent.mkdir(exist_ok=True)
        max_batch = recipe.max_batch or manifest.options.get("max_batch")
        write_chart(folder / place, recipe.tag, target, max_batch)
    for name, text in render(facts).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _charts(manifests: Sequence[Manifest]) -> dict[str, Target]:
    """The targets by the places of their charts: `chart`, or `chart/<target>` for each of several.

    Graphs can be built on several GPUs; the chart is for the first of those, and its values tell which.
    """
    found = {}
    for manifest in manifests:
        precision = manifest.options.get("precision", "fp32")
        name = manifest.target["name"] if manifest.target else None
        fitting = (
            each for each in TARGETS if each.builder == "tensorrt" and precision in each.precisions
        )
        target = find_target(name) if name else next(fitting, find_target("cpu"))
        found[CHART if len(manifests) == 1 else f"{CHART}/{target_name(manifest)}"] = target
    return found


def _write_manifest(
    folder: Path,
    placed: Mapping[str, Bundle],
    recipe: Recipe,
    described: Mapping[str, Bundle] | None = None,
    known: Mapping[str, Any] | None = None,
) -> Manifest:
    """The engines' description, with its files where they lie now.

    With several bundles, each says the rest about itself in its own manifest. `described` are the
    bundles that the package is of, where they are not the ones in it (mounted engines).
    """
    described = described or placed
    first = next(iter(described.values())).manifest
    place = ENGINES if list(placed) == [ENGINES] else None

    def moved(entry: Mapping[str, Any]) -> dict[str, Any]:
        return {**entry, "file": f"{place}/{entry['file']}"}

    options = {
        "max_batch": recipe.max_batch,
        "engines": recipe.engines,
        "targets": [target_name(each.manifest) for each in described.values()],
        "image": {
            "tag": recipe.tag,
            "labels": settings_for([each.manifest for each in described.values()]).labels,
            "architecture": architecture_of([each.manifest for each in described.values()]),
        },
    }
    return write_manifest(
        folder,
        kind="package",
        made_from={where: each.manifest.digest for where, each in described.items()},
        options={
            **(first.options if len(described) == 1 else {}),
            **{name: value for name, value in options.items() if value is not None},
        },
        model=first.model,
        sampler=first.sampler,
        segments=[moved(entry) for entry in first.segments] if place else [],
        embedding=moved(first.embedding) if place and first.embedding else None,
        tokenizer=[f"{place}/{name}" for name in first.tokenizer or ()] if place else None,
        target=first.target if len(described) == 1 else None,
        packages=_RUNTIMES,
        known=_known(placed) if known is None else known,
    )
