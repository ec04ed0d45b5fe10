"""Content-addressed blobs, and reproducible layers of an image as tar archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from canvasrt.errors import CanvasError
from canvasrt.staging import link_or_copy
from canvasrt.types import Json

# Called after each file with its number of bytes.
Counter = Callable[[int], None]

CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
_CHUNK = 1 << 20
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_GZIP_LEVEL = 3  # three times as fast as level 6, with 10% larger files


@dataclass(frozen=True)
class LayerEntry:
    """One member of a layer: a file with a `source` or a `content`, a symbolic link with a `link`, or a folder."""

    name: str
    source: Path | None = None
    content: bytes | None = None
    link: str | None = None
    executable: bool = False
    owner: int = 0


@dataclass(frozen=True)
class ImageLayer:
    """A layer's blob. `diff_id` is the digest of the uncompressed archive."""

    digest: str
    size: int
    diff_id: str
    media_type: str
    unpacked: int
    created_by: str

    def descriptor(self) -> Json:
        """Return the layer's descriptor for an image manifest."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


def check_digest(digest: Any) -> str:
    """Return the 64 digits of a SHA-256 digest. Raises CanvasError for anything else, such as a path."""
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise CanvasError(
            f"the image names a file {digest!r}, which is not a SHA-256 digest",
            "copy the image again, from a registry that you trust: skopeo copy docker://… oci:…",
        )
    return match[1]


class Blobs:
    """The folder `blobs/sha256` of an OCI layout."""

    def __init__(self, layout: Path) -> None:
        self.folder = layout / "blobs" / "sha256"
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Return the path of a blob. Raises CanvasError if `digest` is not a SHA-256 digest."""
        return self.folder / check_digest(digest)

    def add_json(self, data: Mapping[str, Any], media_type: str) -> Json:
        """Write a JSON document; return its descriptor."""
        content = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
        digest = "sha256:" + hashlib.sha256(content).hexdigest()
        self.path(digest).write_bytes(content)
        return {"mediaType": media_type, "digest": digest, "size": len(content)}

    def take(self, source: Path, digest: str) -> None:
        """Add a blob of another layout, as a hard link if possible."""
        target = self.path(digest)
        if target.exists():
            return
        link_or_copy(source, target)

    def add_layer(
        self,
        entries: Iterable[LayerEntry],
        created_by: str,
        *,
        compress: bool,
        count: Counter | None = None,
        above: str = "opt/canvasrt",
    ) -> ImageLayer:
        """Write a layer. Do not `compress` weights: that saves little and makes loading slower.

        Also adds the entries' parent folders down from `above`; the parents of `above` are in the base image.
        """
        return self._write(
            lambda file: write_tar(file, with_parents(entries, above), count), created_by, compress
        )

    def add_archive(self, archive: Path, created_by: str) -> ImageLayer:
        """Write a tar archive as a layer."""

        def copy(file: io.RawIOBase) -> int:
            with archive.open("rb") as source:
                shutil.copyfileobj(source, cast(IO[bytes], file), _CHUNK)
            return archive.stat().st_size

        return self._write(copy, created_by, compress=True)

    def _write(
        self, content_to: Callable[[io.RawIOBase], int], created_by: str, compress: bool
    ) -> ImageLayer:
        partial = self.folder / f".partial-{os.getpid()}"
        try:
            with partial.open("wb") as file:
                blob = _Hashing(file)
                # The gzip header omits the name and the time, because both would differ between runs.
                packed = gzip.GzipFile("", "wb", _GZIP_LEVEL, blob, mtime=0) if compress else blob
                with packed:
                    content = _Hashing(packed)
                    unpacked = content_to(content)
            digest = blob.digest
            partial.rename(self.path(digest))
        finally:
            partial.unlink(missing_ok=True)
        media_type = LAYER_TYPE + ("+gzip" if compress else "")
        return ImageLayer(digest, blob.size, content.digest, media_type, unpacked, created_by)


def entries_of(
    folder: Path, prefix: str, *, skip: Callable[[str], bool] | None = None
) -> Iterator[LayerEntry]:
    """Yield all files and folders in a folder as members below `prefix`."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).as_posix()
        if skip is not None and skip(inside):
            continue
        name = f"{prefix}/{inside}"
        # A bundle's links point to files in a cache; the image gets these files instead of the links.
        if path.is_dir():
            yield LayerEntry(name)
        else:
            yield LayerEntry(name, path, executable=os.access(path, os.X_OK))


def with_parents(entries: Iterable[LayerEntry], above: str) -> list[LayerEntry]:
    """Return the entries plus their parent folders, sorted by name, each once.

    Adds parent folders down from `above`; the parents of `above` are in the base image.
    """
    named = {entry.name: entry for entry in entries}
    for name in list(named):
        for parent in Path(name).parents:
            folder = parent.as_posix()
            if (folder == above or folder.startswith(f"{above}/")) and folder not in named:
                named[folder] = LayerEntry(folder, owner=named[name].owner)
    return [named[name] for name in sorted(named)]


class HashedReader:
    """Reads at most `size` bytes from a file (None: all), and hashes them."""

    def __init__(self, file: Any, size: int | None = None) -> None:
        self._file = file
        self._left = size
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The digest of the bytes read so far."""
        return "sha256:" + self._hash.hexdigest()

    def read(self, size: int = -1) -> bytes:
        """Read like a file."""
        if self._left is not None:
            size = self._left if size < 0 else min(size, self._left)
        data = self._file.read(size)
        if self._left is not None:
            self._left -= len(data)
        self._hash.update(data)
        return data


def exhaust(file: HashedReader) -> None:
    """Read a file to its end."""
    while file.read(_CHUNK):
        pass


class _Hashing(io.RawIOBase):
    """Writes to a file, and hashes and counts the bytes."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self.size += len(data)
        self._file.write(data)
        return len(data)


def write_tar(file: Any, entries: Iterable[LayerEntry], count: Counter | None = None) -> int:
    """Write a reproducible archive; return the total size of its files."""
    total = 0
    with tarfile.open(
        fileobj=file, mode="w|", format=tarfile.GNU_FORMAT, bufsize=_CHUNK
    ) as archive:
        for entry in entries:
            info = _header(entry)
            total += info.size
            if entry.content is not None:
                archive.addfile(info, io.BytesIO(entry.content))
            elif entry.source is not None:
                with entry.source.open("rb") as source:
                    archive.addfile(info, source)
                if count is not None:
                    count(info.size)
            else:
                archive.addfile(info)
    return total


def _header(entry: LayerEntry) -> tarfile.TarInfo:
    info = tarfile.TarInfo(entry.name)
    info.uid = info.gid = entry.owner
    info.mtime = 0
    info.mode = 0o755 if entry.executable else 0o644
    if entry.link is not None:
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.link, 0o777
    elif entry.content is not None:
        info.size = len(entry.content)
    elif entry.source is not None:
        info.size = entry.source.stat().st_size
    else:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    return info
