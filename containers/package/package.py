"""Writes a package: engines, Triton's model repository, and everything to build an image."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from canvasrt.bundle import Bundle, Manifest, load_bundle, write_manifest
from canvasrt.containers.names import ENGINES, IMAGE_FOLDER, MACHINES, MODEL_REPOSITORY, SBOM
from canvasrt.containers.package import releases, wheels
from canvasrt.containers.package.bindings import DISTRIBUTION
from canvasrt.containers.package.chart import CHART, write_chart
from canvasrt.containers.package.image_settings import architecture_of, settings_for, target_name
from canvasrt.containers.package.options import PackageOptions
from canvasrt.containers.package.render import render_files
from canvasrt.containers.package.repository import write_repository
from canvasrt.containers.package.requirements import Pin, requirements, write_requirements
from canvasrt.containers.package.sizes import sizes_of, target_of
from canvasrt.containers.package.wheel import write_wheel
from canvasrt.containers.processes import run_name
from canvasrt.containers.tensors import STREAM_MODEL
from canvasrt.errors import CanvasError, UsageError
from canvasrt.extras import require
from canvasrt.hashes import hash_files
from canvasrt.staging import check_output, link_or_copy, staging

_RUNTIMES = ("onnxruntime-gpu", "onnxruntime", "tensorrt-rtx")


def package(
    source: Path | str | Sequence[Path | str],
    out: Path | str,
    options: PackageOptions | None = None,
) -> Bundle:
    """Write the package of one bundle, or of several bundles for different targets, to `out`.

    A bundle holds engines, or graphs from which the container builds engines.

    Raises CanvasError if a bundle is damaged, bundles do not fit together, the base image cannot load the engines, or
    `out` is not empty. In that case nothing is written.
    """
    check_output(out)  # before the bundles are hashed
    options = options or PackageOptions().on(releases.DEFAULT_BASE)
    bundles = _load(source)
    manifests = [bundle.manifest for bundle in bundles.values()]
    # A base on disk may have the default base's name, but another digest and other versions.
    by_name = options.base_digest == releases.digest_of_name(options.base)
    if options.base == releases.DEFAULT_BASE and by_name:
        options = options.on(releases.base_for(each.target for each in manifests))
    for manifest in manifests:
        releases.check_tensorrt(manifest.target, options.tensorrt, options.base)
    needed = architecture_of(manifests)
    architecture = needed or options.architecture
    backends = backends_of(manifests, options.tensorrt)
    if options.wheels and "tensorrt" in backends and options.tensorrt is None:
        raise CanvasError(
            f"--wheels needs the TensorRT version of {options.base}, which is not known",
            f"give a base image whose version is known, such as --base {releases.REPOSITORY}:{next(iter(releases.TENSORRT))}",
        )
    pins = requirements(backends, options.python, architecture)
    platform = (options.python, architecture)
    fetched = wheels.fetch(pins, *platform) if options.wheels or options.fetch else {}
    # `docker build` may run on any architecture on which the engines run.
    others = () if needed or fetched else MACHINES.keys() - {architecture}
    pins = wheels.with_hashes(pins, fetched, *platform, others)
    with staging(Path(out)) as folder:
        for place, bundle in bundles.items():
            _copy(bundle, folder / place)
        write_repository(folder / MODEL_REPOSITORY, f"../{ENGINES}", max_batch=options.max_batch)
        write_wheel(folder / "wheels")
        for wheel in fetched.values() if options.wheels else ():
            shutil.copyfile(wheel, folder / "wheels" / wheel.name)
        write_requirements(folder, pins)
        _write_image_part(folder, bundles, options, pins)
        _write_texts(folder, bundles, options, pins)
        manifest = _write_manifest(folder, bundles, options)
        _open_to_all(folder)
    return Bundle(Path(out), manifest)


def backends_of(manifests: Sequence[Manifest], tensorrt: str | None) -> dict[str, str | None]:
    """Return the backends that run these bundles, mapped to their required versions. `tensorrt` is the version in the
    base image.

    fp32 graphs run on ONNX Runtime. For other graphs, TensorRT builds engines on the GPU.
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
                "build them with one version, or package them separately",
            )
    return found


@contextlib.contextmanager
def repository_of(bundle: Bundle, engines: Path | None = None) -> Iterator[Path]:
    """Yield the model repository that serves a bundle.

    `engines` is the folder of the engines to serve; None means the bundle's own. The Python backend writes
    compiled files next to the models if it can, so a writable repository is copied.
    """
    root = bundle.path.resolve()
    packaged = bundle.manifest.kind == "package"
    own = root / ENGINES if packaged else root
    chosen = own if engines is None else engines.resolve()
    if (
        packaged
        and chosen == own
        and not os.access(root / MODEL_REPOSITORY / STREAM_MODEL / "1", os.W_OK)
    ):
        yield root / MODEL_REPOSITORY
        return
    with tempfile.TemporaryDirectory(prefix=run_name()) as scratch:
        folder = Path(scratch)
        if packaged:
            shutil.copytree(root / MODEL_REPOSITORY, folder / MODEL_REPOSITORY)
        else:
            write_repository(folder / MODEL_REPOSITORY, f"../{ENGINES}")
        (folder / ENGINES).symlink_to(chosen)
        yield folder / MODEL_REPOSITORY


def _load(source: Path | str | Sequence[Path | str]) -> dict[str, Bundle]:
    """Load the bundles, keyed by folder in the package: `engines`, or for several bundles, `engines/<target>`."""
    paths = [source] if isinstance(source, (str, Path)) else list(source)
    if not paths:
        raise UsageError("no bundle was given", "give a folder that `canvasrt build` wrote")
    bundles = [load_bundle(path, kind=("engines", "graphs")) for path in paths]
    if len(bundles) == 1:
        return {ENGINES: bundles[0]}
    placed: dict[str, Bundle] = {}
    for bundle in bundles:
        name = target_name(bundle.manifest)
        if f"{ENGINES}/{name}" in placed:
            raise CanvasError(
                f"two bundles are for {name}", "leave one out: a package has one bundle per target"
            )
        placed[f"{ENGINES}/{name}"] = bundle
    first = bundles[0]
    for other in bundles[1:]:
        if other.manifest.model != first.manifest.model:
            raise CanvasError(
                f"{other.path} and {first.path} contain different models", "package them separately"
            )
    hosts = {host for bundle in bundles if (host := architecture_of([bundle.manifest]))}
    if len(hosts) > 1:
        raise CanvasError(
            f"the targets need different hosts, {' and '.join(sorted(hosts))}; an image has one architecture",
            "package them separately",
        )
    return placed


def _copy(bundle: Bundle, out: Path) -> None:
    """Copy a bundle, as hard links if possible, since engines are large and bundles never change."""
    for name in (*bundle.manifest.files, "manifest.json"):
        link_or_copy(bundle.path / name, out / name)


def _open_to_all(folder: Path) -> None:
    """Make the files of an image readable for all users, whatever the umask.

    In an image, files belong to root, but the server runs as another user. The package's own folder keeps its mode. A
    hard link to a file that other users cannot read is replaced by a copy, so that the original keeps its mode.
    """
    for path in folder.rglob("*"):
        mode = path.stat().st_mode & 0o777
        wanted = mode | (0o555 if path.is_dir() else 0o444)
        if mode == wanted:
            continue
        if path.is_file() and path.stat().st_nlink > 1:
            copy = path.with_name(f".{path.name}")
            shutil.copyfile(path, copy)
            copy.replace(path)
        path.chmod(wanted)


def _write_image_part(
    folder: Path, bundles: Mapping[str, Bundle], options: PackageOptions, pins: Sequence[Pin]
) -> None:
    """Write the manifest and the bill of materials of the image's content."""
    require("cyclonedx", "serve")
    from canvasrt.containers.package.sbom import write_sbom

    copied = bundles if options.engines == "copy" else {}
    known = _known(copied)
    for place in copied:
        name = f"{place}/manifest.json"
        known[name] = _entry(folder, name)
    models = [
        path.relative_to(folder).as_posix()
        for path in sorted((folder / MODEL_REPOSITORY).rglob("*"))
        if path.is_file()
    ]
    known |= {name: _entry(folder, name) for name in models}
    manifests = [bundle.manifest for bundle in bundles.values()]
    (own,) = (folder / "wheels").glob("canvasrt-*.whl")
    write_sbom(
        folder / SBOM,
        manifests,
        pins,
        known,
        options.base,
        options.contents,
        options.base_digest,
        _entry(own.parent, own.name)["sha256"],
    )
    known[SBOM] = _entry(folder, SBOM)
    (folder / IMAGE_FOLDER).mkdir()
    # In the image, the files are next to this manifest. Here, temporary links replace the files.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        linked = Path(scratch)
        for name in known:
            (linked / name).parent.mkdir(parents=True, exist_ok=True)
            (linked / name).symlink_to(folder / name)
        _write_manifest(linked, copied, options, described=bundles, known=known)
        (linked / "manifest.json").rename(folder / IMAGE_FOLDER / "manifest.json")


def _entry(folder: Path, name: str) -> dict[str, Any]:
    digest = hash_files(folder, [name])[name]
    return {"sha256": digest, "bytes": (folder / name).stat().st_size}


def _known(bundles: Mapping[str, Bundle]) -> dict[str, dict[str, Any]]:
    """Return the files' manifest entries, keyed by path. Their hashes were checked when the bundles were loaded."""
    return {
        f"{place}/{name}": entry
        for place, bundle in bundles.items()
        for name, entry in bundle.manifest.files.items()
    }


def _write_texts(
    folder: Path, bundles: Mapping[str, Bundle], options: PackageOptions, pins: Sequence[Pin]
) -> None:
    """Write the Dockerfile, the compose file and the charts."""
    manifests = [bundle.manifest for bundle in bundles.values()]
    backends = backends_of(manifests, options.tensorrt)
    facts = {
        "base": options.base,
        "tag": options.tag,
        "engines": list(bundles) if options.engines == "copy" else [],
        "tensorrt": "tensorrt" in backends,
        "tensorrt_version": backends.get("tensorrt") or "",
        "bindings": DISTRIBUTION,
        "unhashed": any(not pin.sha256 for pin in pins),
        "settings": settings_for(manifests),
    }
    for manifest in manifests:
        chart = folder / CHART / ("" if len(manifests) == 1 else target_name(manifest))
        chart.parent.mkdir(exist_ok=True)
        target, max_batch = (
            target_of(manifest),
            options.max_batch or manifest.options.get("max_batch"),
        )
        sizes = sizes_of(manifest, target, max_batch)
        write_chart(chart, options.tag, target, max_batch, sizes)
    for name, text in render_files(facts).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _write_manifest(
    folder: Path,
    placed: Mapping[str, Bundle],
    options: PackageOptions,
    described: Mapping[str, Bundle] | None = None,
    known: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write the manifest of a package or its image: the engines' manifest with the files' new paths.

    With several bundles, only the bundles' own manifests have the details. `placed`: bundles whose files are listed.
    `described`: the bundles to describe; None means `placed`, which is empty for an image without engines.
    `known`: the entries of all files; None means the entries of the files of `placed`.
    """
    described = described or placed
    first = next(iter(described.values())).manifest
    place = ENGINES if list(placed) == [ENGINES] else None

    def moved(entry: Mapping[str, Any]) -> dict[str, Any]:
        return {**entry, "file": f"{place}/{entry['file']}"}

    packaged = {
        "max_batch": options.max_batch,
        "engines": options.engines,
        "targets": [target_name(each.manifest) for each in described.values()],
        "image": {
            "tag": options.tag,
            "base": options.base,
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
            **{name: value for name, value in packaged.items() if value is not None},
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
