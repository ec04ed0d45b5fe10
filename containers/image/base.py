"""Reads the base image: an OCI layout, or an archive that `docker save` wrote."""

from __future__ import annotations

import gzip
import hashlib
import json
import posixpath
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Self, cast

from canvasrt.containers.image.blobs import (
    LAYER_TYPE,
    Blobs,
    HashedReader,
    Json,
    check_digest,
    exhaust,
)
from canvasrt.errors import CanvasError
from canvasrt.hashes import hash_files

_PYTHON = re.compile(r"(?:\./)?usr/(?:local/)?bin/python3$")
_HEX = re.compile(r"(?:^|/)([0-9a-f]{64})(?:\.json)?$")
_MAGIC = {b"\x1f\x8b": "+gzip", b"\x28\xb5\x2f\xfd": "+zstd"}
_INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "manifest.list.v2+json")
# Size limit of a manifest or configuration, since both are read into memory. Registries have the same limit.
_DOCUMENT_LIMIT = 4 << 20
# Limits on an archive whose signature is not checked yet: maximum bytes of a header, and maximum number of members.
_HEADER_LIMIT, _MOST_MEMBERS = 1 << 16, 10_000
_DAMAGED = "copy it again; `skopeo inspect` shows whether it is intact"
_GET_ONE = (
    "download one: skopeo copy docker://nvcr.io/nvidia/tritonserver:26.09-py3 oci:triton:26.09, then give"
    " --base triton; canvasrt does not contact registries"
)


@dataclass(frozen=True)
class BaseLayer:
    """A layer of the base image, as stored on disk."""

    file: Path
    digest: str
    size: int
    media_type: str
    # Offset of the layer, if `file` is an archive of several layers.
    offset: int = 0

    @contextmanager
    def opened(self) -> Iterator[tuple[HashedReader, HashedReader]]:
        """Yield two readers: of the stored bytes, and of the unpacked bytes. Reading the second advances both."""
        if self.media_type.endswith("+zstd"):
            raise CanvasError(
                f"a layer of the base image is compressed with zstd: {self.digest or self.file}",
                "copy the image with gzip: skopeo copy --dest-compress-format gzip …",
            )
        with self.file.open("rb") as file:
            file.seek(self.offset)
            stored = HashedReader(file, self.size)
            if self.media_type.endswith("+gzip"):
                yield stored, HashedReader(gzip.GzipFile(fileobj=cast(IO[bytes], stored)))
            else:
                yield stored, HashedReader(stored)

    def members(
        self, diff_id: str | None = None
    ) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
        """Yield pairs: a member of the layer's archive, and the archive.

        Raises CanvasError for a damaged layer. After the last member, checks that the stored bytes have the
        layer's digest. If `diff_id` is given, also checks that the unpacked bytes have the digest `diff_id`.
        """
        try:
            with self.opened() as (stored, content):
                with tarfile.open(fileobj=cast(IO[bytes], content), mode="r|") as archive:
                    for member in archive:
                        yield member, archive
                exhaust(content)
                exhaust(stored)
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise damaged(self) from error
        if stored.digest != self.digest or diff_id not in (None, content.digest):
            raise damaged(self)


@dataclass(frozen=True)
class Base:
    """An image on disk."""

    path: Path
    config: Json
    layers: tuple[BaseLayer, ...]
    digest: str
    names: tuple[str, ...] = field(default=())

    @property
    def architecture(self) -> str:
        """The architecture as docker names it: amd64 or arm64."""
        return str(self.config.get("architecture", "amd64"))

    @property
    def labels(self) -> dict[str, str]:
        """The image's labels."""
        return (self.config.get("config") or {}).get("Labels") or {}

    @property
    def tag(self) -> str:
        """The first name of the image; empty if it has no name."""
        return self.names[0] if self.names else ""

    @property
    def size(self) -> int:
        """The total stored size of all layers, in bytes."""
        return sum(layer.size for layer in self.layers)

    @cached_property
    def environment(self) -> dict[str, str]:
        """The environment variables that the image sets."""
        pairs = (line.partition("=") for line in self.config.get("config", {}).get("Env") or ())
        return {name: value for name, _, value in pairs}

    @cached_property
    def python(self) -> tuple[str, str]:
        """The path of `python3` and its version, such as `3.12`. Raises CanvasError without python3."""
        found = ""
        for layer in self.layers:
            for member, _ in layer.members():
                if _PYTHON.match(member.name) and (member.issym() or member.islnk()):
                    found = f"{member.name} {member.linkname}"
        match = re.search(r"python(3\.\d+)$", found)
        if match is None:
            raise CanvasError(
                f"the base image {self.path} has no python3",
                "use an image with tritonserver and its Python backend",
            )
        return "/" + found.split()[0].removeprefix("./"), match[1]

    def copy_into(self, blobs: Blobs) -> list[Json]:
        """Copy every layer to `blobs`; return the layers' descriptors.

        Raises CanvasError for a layer whose content does not match its digest.
        """
        for layer in self.layers:
            if layer.offset == 0:
                name = layer.file.name
                if "sha256:" + hash_files(layer.file.parent, [name])[name] != layer.digest:
                    raise damaged(layer)
                blobs.take(layer.file, layer.digest)
            elif not blobs.path(layer.digest).exists():
                with layer.opened() as (stored, _), blobs.path(layer.digest).open("wb") as out:
                    shutil.copyfileobj(stored, out, 1 << 20)
                if stored.digest != layer.digest:
                    raise damaged(layer)
        return [
            {"mediaType": layer.media_type, "digest": layer.digest, "size": layer.size}
            for layer in self.layers
        ]


def read_base(path: Path, architecture: str | None = None) -> Base:
    """Read the image at `path`: a folder with an OCI layout, or an archive of one image.

    Raises CanvasError if there is no image, or if it is damaged or has a different architecture.
    """
    path = path.expanduser()
    with _readable(path, "base image"):
        if (path / "index.json").is_file():
            base = _read_layout(path, architecture)
        elif path.is_file() and tarfile.is_tarfile(path):
            base = _read_archive(path)
        else:
            raise CanvasError(
                f"{path} is neither an OCI layout nor a docker archive",
                _GET_ONE,
            )
    if architecture not in (None, base.architecture):
        raise _for_other(path, base.architecture, architecture)
    return base


def _for_other(path: Path, found: str, wanted: str | None) -> CanvasError:
    return CanvasError(
        f"the base image {path} is for {found}, but the engines need {wanted}",
        f"use the image for that platform: skopeo copy --override-arch {wanted} …",
    )


@contextmanager
def _readable(path: Path, what: str) -> Iterator[None]:
    """Convert any exception that a damaged image causes to a CanvasError."""
    try:
        yield
    except (
        *(KeyError, ValueError, IndexError, TypeError, AttributeError, RecursionError),
        *(OSError, EOFError, tarfile.TarError, zlib.error),
    ) as error:
        why = error or type(error).__name__
        raise CanvasError(f"the {what} {path} is damaged: {why}", _DAMAGED) from error


def _check_count(layers: int, config: Json) -> None:
    ids = len(config["rootfs"]["diff_ids"])
    if ids != layers:
        raise ValueError(f"it has {layers} layers but {ids} digests")


def damaged(layer: BaseLayer) -> CanvasError:
    """Return the error for a layer whose content does not match its digest."""
    return CanvasError(f"the layer {layer.digest} does not match its content", _DAMAGED)


def _read_layout(path: Path, architecture: str | None) -> Base:
    def blob(descriptor: Json) -> Path:
        file = path / "blobs" / "sha256" / check_digest(descriptor["digest"])
        if not file.is_file():
            raise ValueError(f"it has no file {descriptor['digest']}")
        return file

    def document(descriptor: Json) -> Json:
        file = blob(descriptor)
        _check_document(descriptor["digest"], file.stat().st_size)
        return _document(descriptor["digest"], file.read_bytes())

    index = _index(path)
    descriptor = top = _only(index["manifests"], architecture, path)
    manifest = document(descriptor)
    while "manifests" in manifest or descriptor.get("mediaType", "").endswith(_INDEX_TYPES):
        descriptor = _only(manifest["manifests"], architecture, path)
        manifest = document(descriptor)
    config = document(manifest["config"])
    _check_count(len(manifest["layers"]), config)
    layers = []
    for entry in manifest["layers"]:
        file = blob(entry)
        if type(entry["size"]) is not int or file.stat().st_size != entry["size"]:
            raise ValueError(f"{file.name} has {file.stat().st_size} bytes, not {entry['size']}")
        media_type = LAYER_TYPE + _compression(file, 0)
        layers.append(BaseLayer(file, entry["digest"], entry["size"], media_type))
    # The full name of the image. skopeo's layouts only have a tag, which is not a name.
    name = (top.get("annotations") or {}).get("io.containerd.image.name", "")
    names = (name.removeprefix("docker.io/").removeprefix("library/"),) if name else ()
    return Base(path, config, tuple(layers), descriptor["digest"], names)


class _Header(tarfile.TarInfo):
    """A tar header with a size limit, because tarfile reads long names of any size into memory. For archives whose
    signature is not checked yet."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str | None, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)  # type: ignore[arg-type]
        if header.type not in tarfile.REGULAR_TYPES and header.size > _HEADER_LIMIT:
            raise ValueError(f"a header has {header.size} bytes; at most {_HEADER_LIMIT} are read")
        return header


def signed_digest(path: Path, alone: bool = False) -> str:
    """Return the digest by which a signature identifies the image at `path`: the digest of a layout's manifest, or of
    an archive's configuration. Does not read layers.

    With `alone`, raises CanvasError if there is anything else that another program might load as the image.
    """
    with _readable(path, "image"):
        if (path / "index.json").is_file():
            manifests = _index(path)["manifests"]
            more = len(manifests) > 1
            digest = str(_only(manifests, None, path)["digest"])
        else:
            with tarfile.open(path, "r:", tarinfo=_Header) as archive:
                listed = list(islice(archive, _MOST_MEMBERS))
                members = {member.name: member for member in listed}
                (image,) = json.loads(_content(archive, members["manifest.json"]))
                config = _content(archive, members[image["Config"]])
            own = {"manifest.json", image["Config"], *image["Layers"]}
            # Other members can change what is loaded: containerd and podman prefer an `index.json`, and a
            # `./manifest.json` overwrites `manifest.json`.
            more = sorted(member.name for member in listed) != sorted(own)
            digest = "sha256:" + hashlib.sha256(config).hexdigest()
    if alone and more:
        raise CanvasError(
            f"{path} contains more than the signed image, so another program may load a different image from it",
            "verify the file or folder that `canvasrt package` wrote, or a copy of it",
        )
    return digest


def _index(path: Path) -> Json:
    file = path / "index.json"
    _check_document(file.name, file.stat().st_size)
    return json.loads(file.read_text())


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Return the content of an archive's member."""
    _check_document(member.name, member.size)
    file = archive.extractfile(member)
    if file is None:
        raise ValueError(f"{member.name} is not a file")
    return file.read()


def _check_document(name: str, size: int) -> None:
    if size > _DOCUMENT_LIMIT:
        raise ValueError(f"{name} has {size} bytes; a document has at most {_DOCUMENT_LIMIT}")


def _document(digest: str, content: bytes) -> Json:
    """Parse a JSON document. Raises ValueError if the content does not match `digest`."""
    if "sha256:" + hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"{digest} does not match its content")
    return json.loads(content)


def _only(manifests: list[Json], architecture: str | None, path: Path) -> Json:
    """Return the only manifest that fits an architecture. A manifest that names no platform fits every architecture.
    Raises CanvasError unless exactly one fits."""
    images = [
        each for each in manifests if each.get("platform", {}).get("architecture") != "unknown"
    ]
    fitting = [
        each
        for each in images
        if architecture in (None, each.get("platform", {}).get("architecture", architecture))
    ]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting and images:
        names = ", ".join(each["platform"]["architecture"] for each in images)
        raise _for_other(path, names, architecture)
    raise CanvasError(
        f"{path} contains {len(fitting)} images",
        "give a layout with one image, or with one image per platform",
    )


def _read_archive(path: Path) -> Base:
    """Locate the layers in an archive. They are not extracted, because archives can be large."""
    with tarfile.open(path, "r:") as archive:
        members = {member.name: member for member in archive}
        (image,) = json.loads(_content(archive, members["manifest.json"]))
        raw_config = _content(archive, members[image["Config"]])
        digest = "sha256:" + hashlib.sha256(raw_config).hexdigest()
        # docker and podman name the configuration's file by its digest.
        if named := _HEX.search(image["Config"]):
            _document(f"sha256:{named[1]}", raw_config)
        config = json.loads(raw_config)
        _check_count(len(image["Layers"]), config)
        layers = [
            _archived_layer(path, _followed(members, name), diff_id)
            for name, diff_id in zip(image["Layers"], config["rootfs"]["diff_ids"], strict=True)
        ]
    return Base(path, config, tuple(layers), digest, tuple(image.get("RepoTags") or ()))


def _followed(members: dict[str, tarfile.TarInfo], name: str) -> tarfile.TarInfo:
    """Return the member that a name refers to, following links: old versions of docker link identical layers."""
    member, passed = members[name], {name}
    while member.issym() or member.islnk():
        target = posixpath.join("/", posixpath.dirname(member.name), member.linkname)
        member = members[member.linkname if member.islnk() else posixpath.normpath(target)[1:]]
        if member.name in passed:
            raise ValueError(f"the links of {name} form a cycle")
        passed.add(member.name)
    if not member.isfile():
        raise ValueError(f"{name} is not a file")
    return member


def _archived_layer(path: Path, member: tarfile.TarInfo, diff_id: str) -> BaseLayer:
    """Return an archive's layer. Computes the layer's digest, since archives only list digests of unpacked content.

    Raises ValueError if the unpacked content does not have the digest `diff_id`.
    """
    media_type = LAYER_TYPE + _compression(path, member.offset_data)
    layer = BaseLayer(path, "", member.size, media_type, member.offset_data)
    with layer.opened() as (stored, content):
        exhaust(content)
        exhaust(stored)
    if content.digest != diff_id:
        raise ValueError(f"{member.name} does not match its digest {diff_id}")
    return replace(layer, digest=stored.digest)


def _compression(file: Path, offset: int) -> str:
    with file.open("rb") as opened:
        opened.seek(offset)
        start = opened.read(4)
    return next((suffix for magic, suffix in _MAGIC.items() if start.startswith(magic)), "")
