"""Bundles: the folders that stages exchange. A manifest lists each bundle's files and their hashes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import canvasrt
from canvasrt.checkpoints.config import Layer, ModelConfig, SamplerDefaults
from canvasrt.errors import CanvasError
from canvasrt.hashes import DIFFERS, canonical, hash_files
from canvasrt.types import Json

MANIFEST = "manifest.json"
BUNDLE_SCHEMA = 1
# The fields of a manifest.
_FIELDS = (
    *("schema", "kind", "made_by", "made_from", "options", "model", "sampler", "segments"),
    *("embedding", "tokenizer", "target", "files", "digest"),
)
# A manifest can lack these fields. Only GPU engines have a pass plan, and earlier versions did not write it.
_MAY_HAVE = ("passes",)
BUNDLE_KINDS = ("graphs", "engines", "package")
_HOW_TO_MAKE = {
    "graphs": "`canvasrt export CHECKPOINT -o DIR` writes graphs",
    "engines": "`canvasrt build CHECKPOINT_OR_GRAPHS --target NAME -o DIR` writes engines",
    "package": "`canvasrt package BUNDLE -o DIR` writes a package",
}
# Names and versions in a manifest must have this form. They are the only texts of a manifest that get into command
# lines, Dockerfiles and requirements.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,127}")
_AGAIN = "the bundle is damaged or was edited: make or copy it again"
_REBUILD = "make it again with this version: `canvasrt build`, or `export` for graphs and `package` for packages"


class _Record(dict[str, Any]):
    """A JSON object in a manifest. Reading a missing field raises CanvasError."""

    file = Path(MANIFEST)
    whole: Mapping[str, Any] = {}  # the manifest

    def __missing__(self, key: str) -> Any:
        raise _other_version(self.file, f"has no field {key!r}", self.whole)


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.json. It contains no machine names and no timestamps."""

    data: Json

    @property
    def kind(self) -> str:
        """`graphs`, `engines` or `package`."""
        return self.data["kind"]

    @property
    def digest(self) -> str:
        """The SHA-256 of the manifest's canonical JSON without this field. It identifies the bundle's content."""
        return self.data["digest"]

    @property
    def made_by(self) -> Json:
        """The versions of the software that wrote the bundle."""
        return self.data["made_by"]

    @property
    def made_from(self) -> Json:
        """The hashes of the bundle's sources."""
        return self.data["made_from"]

    @property
    def options(self) -> Json:
        """The options with which the bundle was made."""
        return self.data["options"]

    @cached_property
    def model(self) -> ModelConfig:
        """The network's configuration."""
        return ModelConfig.from_json(self.data["model"])

    @cached_property
    def sampler(self) -> SamplerDefaults:
        """The checkpoint's generation settings."""
        return SamplerDefaults.from_json(self.data["sampler"])

    @property
    def segments(self) -> list[Json]:
        """One entry per segment of the network: its name, its file and, for a body segment, its layers."""
        return self.data["segments"]

    @property
    def embedding(self) -> Json:
        """The embedding table's file, dtype and shape; if the host has a copy of the head's weights, also the location
        of that copy. Empty in a package."""
        return self.data["embedding"] or {}

    @property
    def tokenizer(self) -> list[str] | None:
        """The tokenizer's files."""
        return self.data["tokenizer"]

    @property
    def target(self) -> Json | None:
        """The target of engines; None for graphs."""
        return self.data["target"]

    @property
    def passes(self) -> Json | None:
        """The pass plan for a GPU (`canvasrt.pass_shapes.PassPlan`); None if the bundle has no plan."""
        return self.data.get("passes")

    @property
    def files(self) -> dict[str, Json]:
        """`sha256` and `bytes` of every file, by its path in the bundle."""
        return self.data["files"]

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(entry["bytes"] for entry in self.files.values())


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk."""

    path: Path
    manifest: Manifest

    @property
    def takes_images(self) -> bool:
        """Whether the model has both a vision tower and a chat template that supports images. A checkpoint that was not
        trained on images has no such template."""
        names = [each["name"] for each in self.manifest.segments]
        if self.manifest.model.vision is None or (names and "vision" not in names):
            return False
        return self.mentions("image")

    def mentions(self, word: str) -> bool:
        """Whether the chat template contains this word; true if the bundle has no chat template file."""
        files = self.manifest.tokenizer or ()
        template = next((each for each in files if each.endswith("chat_template.jinja")), None)
        return template is None or word in self.file(template).read_text(encoding="utf-8")

    def file(self, name: str) -> Path:
        """Return the path of a file that the manifest lists."""
        if name not in self.manifest.files:
            raise CanvasError(f"{self.path} lists no file {name}", _AGAIN)
        return self.path / name

    def unlisted(self) -> list[str]:
        """Return the files that are in the folder, but not in the manifest. Nothing uses them."""
        return sorted(set(_files_under(self.path)) - set(self.manifest.files) - {MANIFEST})


def made_by(packages: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions of canvasrt and of each named distribution that is installed."""
    found = {"canvasrt": canvasrt.__version__}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_manifest(
    folder: Path,
    *,
    kind: str,
    made_from: Mapping[str, Any],
    options: Mapping[str, Any],
    model: ModelConfig,
    sampler: SamplerDefaults,
    segments: Sequence[Mapping[str, Any]],
    embedding: Mapping[str, Any] | None,
    tokenizer: Sequence[str] | None,
    target: Mapping[str, Any] | None = None,
    passes: Mapping[str, Any] | None = None,
    packages: Sequence[str] = (),
    known: Mapping[str, Json] | None = None,
) -> Manifest:
    """Describe every file under `folder` in its manifest.json.

    packages: distributions whose versions affect the result. known: `files` entries, by path, of files that were
    verified or hashed before. These files are not hashed again.
    """
    if kind not in BUNDLE_KINDS:
        raise ValueError(f"kind {kind!r} is none of {BUNDLE_KINDS}")
    known = known or {}
    names = [name for name in _files_under(folder) if name != MANIFEST]
    hashed = hash_files(folder, [name for name in names if name not in known])
    files = {
        name: {"sha256": hashed[name], "bytes": (folder / name).stat().st_size}
        if name in hashed
        else dict(known[name])
        for name in names
    }
    data: Json = {
        "schema": BUNDLE_SCHEMA,
        "kind": kind,
        "made_by": made_by(packages),
        "made_from": dict(made_from),
        "options": dict(options),
        "model": model.to_json(),
        "sampler": sampler.to_json(),
        "segments": [dict(segment) for segment in segments],
        "embedding": None if embedding is None else dict(embedding),
        "tokenizer": None if tokenizer is None else list(tokenizer),
        "target": None if target is None else dict(target),
        "files": files,
    }
    if passes is not None:
        data["passes"] = dict(passes)
    data = json.loads(canonical(data))  # as JSON is read: tuples become lists, keys strings
    data["digest"] = _digest(data)
    (folder / MANIFEST).write_text(canonical(data), encoding="utf-8")
    return Manifest(data)


def load_bundle(
    path: Path | str,
    kind: str | tuple[str, ...] | None = None,
    check: bool = True,
    hasher: Callable[..., dict[str, str]] = hash_files,
    absent: Callable[[Bundle], Collection[str]] | None = None,
) -> Bundle:
    """Open a bundle. With `check`, compare every file's size and SHA-256 with the manifest.

    hasher: replaces `hash_files`. absent: takes the bundle, and returns the files that are allowed to be missing.
    Raises CanvasError, which names the missing or differing file, or the expected kind.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    wanted = (kind,) if isinstance(kind, str) else kind
    if wanted and manifest.kind not in wanted:
        raise CanvasError(
            f"{path} is a bundle of {manifest.kind}, but {' or '.join(wanted)} are needed here",
            ("engines" in wanted and _bundles_in(path, "engines/**")) or _HOW_TO_MAKE[wanted[0]],
        )
    bundle = Bundle(path, manifest)
    _check_sizes(bundle, absent)
    if check:
        there = [name for name in manifest.files if absent is None or (path / name).is_file()]
        hashes = hasher(path, there, f"checking {manifest.kind}")
        for name in there:
            if hashes[name] != manifest.files[name]["sha256"]:
                raise CanvasError(f"{path / name} {DIFFERS}", _AGAIN)
    return bundle


def _bundles_in(path: Path, within: str = "*") -> str | None:
    """Return a hint that names the bundles in `path`, such as builds for several targets; None if `path` has no
    bundles."""
    found = sorted(str(each.parent) for each in path.glob(f"{within}/{MANIFEST}"))
    return f"name one of its bundles: {', '.join(found)}" if found else None


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    try:
        raw = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CanvasError(
            f"{path} is not a bundle: it has no {MANIFEST}"
            if path.exists()
            else f"no bundle at {path}",
            _bundles_in(path)
            or "a bundle is a folder written by `canvasrt export`, `build` or `package`",
        ) from None
    return parse_manifest(raw, file)


def parse_manifest(raw: bytes, file: Path) -> Manifest:
    """Parse a manifest from `raw`, the bytes of `file`. Raises CanvasError if the manifest is damaged, unsafe, or from
    another version."""
    try:
        data = json.loads(raw, object_hook=_Record)
        schema = data.get("schema")
    except (ValueError, AttributeError, RecursionError):
        raise CanvasError(f"{file} is damaged", _AGAIN) from None
    if schema != BUNDLE_SCHEMA:
        raise _other_version(file, f"has schema {schema!r}, not {BUNDLE_SCHEMA}", data)
    # The digest detects changed values; comparing the canonical form detects all other changed bytes.
    if data.get("digest") != _digest(data) or canonical(data).encode() != raw:
        raise CanvasError(f"{file} is damaged: its digest disagrees with its content", _AGAIN)
    try:
        _check_fields(file, data)
        _check_strings(file, data)
        _check_files(file, data)
    except (AttributeError, TypeError):  # a value of a wrong type
        raise CanvasError(f"{file} is damaged", _AGAIN) from None
    return Manifest(data)


def _other_version(file: Path, what: str, data: Mapping[str, Any]) -> CanvasError:
    """Return the error for a manifest that another version wrote. Values in `data` may have any type."""
    ours, by = canvasrt.__version__, data.get("made_by")
    version = str(by.get("canvasrt")) if isinstance(by, dict) else ours
    known = version != ours and _WORD.fullmatch(version)
    writer = f"canvasrt {version}" if known else "another version of canvasrt"
    return CanvasError(f"{file} {what}: {writer} wrote it; this is canvasrt {ours}", _REBUILD)


def _check_fields(file: Path, data: Mapping[str, Any]) -> None:
    """Raise CanvasError if a manifest, or a configuration in it, lacks a field or has an unknown field."""
    for record in (each for each in _parts(data) if isinstance(each, _Record)):
        vars(record).update(file=file, whole=data)
    kinds: tuple[tuple[Mapping[str, Any], type], ...] = (
        (data["model"], ModelConfig),
        (data["sampler"], SamplerDefaults),
        *((layer, Layer) for layer in data["model"]["layers"]),
    )
    wanted = [(data, {*_FIELDS, *_MAY_HAVE}, set(_FIELDS))]
    for found, kind in kinds:
        known = {each.name for each in fields(kind)}
        wanted.append((found, known, {e.name for e in fields(kind) if e.default is MISSING}))
    for found, known, needed in wanted:
        if missing := sorted(needed - found.keys()):
            raise _other_version(file, f"has no field {missing[0]!r}", data)
        if unknown := sorted(found.keys() - known):
            raise _other_version(file, f"has a field {unknown[0]!r}", data)


def _check_strings(file: Path, data: Mapping[str, Any]) -> None:
    """Raise CanvasError for a string with control characters, and for a name or version that is not a plain word,
    because a manifest may come from an untrusted source."""
    target = data["target"] or {}
    words = {f"made_by.{name}": version for name, version in data["made_by"].items()}
    words |= {
        f"target.{name}": target[name]
        for name in ("name", "backend", "builder_version")
        if target.get(name) is not None
    }
    for place, word in words.items():
        if not isinstance(word, str) or not _WORD.fullmatch(word):
            raise CanvasError(
                f"{file}: {place} is {word!r}, which is not a name or a version", _AGAIN
            )
    for text in (each for each in _parts(data) if isinstance(each, str)):
        if not text.isprintable():
            raise CanvasError(f"{file} has a string with control characters: {text[:80]!r}", _AGAIN)


def _check_files(file: Path, data: Mapping[str, Any]) -> None:
    """Raise CanvasError for a listed file outside the bundle, and TypeError for a hash or size of a wrong type."""
    for name, entry in data["files"].items():
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts:
            raise CanvasError(f"{file} lists a file outside the bundle: {name}", _AGAIN)
        if not isinstance(entry["sha256"], str) or not isinstance(entry["bytes"], int):
            raise TypeError(name)


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value and everything nested in it, including names of fields."""
    yield value
    if isinstance(value, dict | list):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        for each in inside:
            yield from _parts(each)


def _check_sizes(bundle: Bundle, absent: Callable[[Bundle], Collection[str]] | None) -> None:
    missing = [name for name in bundle.manifest.files if not (bundle.path / name).is_file()]
    gone = absent(bundle) if absent and missing else ()
    for name, entry in bundle.manifest.files.items():
        file = bundle.path / name
        if name in missing:
            if name in gone:
                continue
            raise CanvasError(f"{file} is missing", _AGAIN)
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise CanvasError(
                f"{file} has {size} bytes; the manifest says {entry['bytes']}", _AGAIN
            )


def _digest(data: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.sha256(canonical(rest).encode()).hexdigest()


def _files_under(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
