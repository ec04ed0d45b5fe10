"""The cache of graphs and engines. A key is a hash of all inputs that determine a result; callers list these inputs."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import canvasrt
from canvasrt import extras
from canvasrt.bundle import Bundle, load_bundle
from canvasrt.errors import CanvasError
from canvasrt.hashes import HashMemo, canonical, hash_files
from canvasrt.progress import report
from canvasrt.staging import NO_LOCKS, check_output, link_or_copy, remove_stale, staging

# For each kind of work: the maximum total size, in bytes, of the progress that is kept when work is interrupted.
_KEPT_BYTES = 20 * 10**9
_ENGINE, _KERNELS, _ENTRY = "engine", "kernels", "entry.json"

# Distributions whose versions affect the graphs.
EXPORTED_BY = ("torch", "onnx", "onnx-ir", "onnxscript")
QUANTIZED_BY = (*EXPORTED_BY, "nvidia-modelopt", "numpy")
# Folders of canvasrt/ whose code affects graphs.
_SHARED = ("checkpoints", "graphs", "recipes")
# Takes a bundle, and returns the files that are allowed to be missing.
Absent = Callable[[Bundle], Collection[str]]


def cache_folder() -> Path:
    """Return the folder that `CANVASRT_CACHE` names, or else canvasrt's folder in the user's cache."""
    if own := os.environ.get("CANVASRT_CACHE"):
        return Path(own).expanduser().resolve()
    return user_folder("XDG_CACHE_HOME", ".cache")


def user_folder(variable: str, default: str) -> Path:
    """Return canvasrt's folder inside the folder that the environment variable `variable` names, or else inside
    `default` in the user's home. Raises CanvasError if both are missing."""
    try:
        base = Path(os.environ.get(variable) or f"~/{default}").expanduser()
    except RuntimeError as error:
        raise CanvasError("this user has no home folder", f"set HOME or {variable}") from error
    return base.resolve() / "canvasrt"


def check_cache() -> None:
    """Raise CanvasError if the cache cannot be written."""
    folder = cache_folder()
    try:
        check_output(folder / "engines" / "new")
    except CanvasError as error:
        raise _unusable(folder, error) from error


def known_hashes(root: Path, names: Iterable[str], doing: str = "") -> dict[str, str]:
    """Return the same as `hash_files`, but reuse the hashes of large files that have not changed."""
    return HashMemo(cache_folder() / "hashes.json").hash_files(root, names, doing)


def key_of(made_from: Mapping[str, Any]) -> str:
    """Return the cache key, a SHA-256, of a result that these inputs determine."""
    return hashlib.sha256(canonical(made_from).encode()).hexdigest()


def code_hash(paths: Sequence[Path]) -> str:
    """Return one SHA-256 of all source files in `paths`, a list of files and folders.

    As part of a cache key, it prevents the reuse of files that different code wrote.
    """
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = file.relative_to(path).as_posix()
            digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def versions(packages: tuple[str, ...], *stages: str) -> dict[str, Any]:
    """Return the versions of distributions, and a hash of the source code of `stages` and of the code that all stages
    share. The hash is needed because our code can change without a new version."""
    found = {name: version for name in packages if (version := extras.version(name))}
    shared = Path(canvasrt.__file__).parent
    sources = [*sorted(shared.glob("*.py")), *(shared / room for room in _SHARED)]
    for stage in stages:
        spec = importlib.util.find_spec(f"canvasrt.{stage}")
        sources += [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    return {**found, "canvasrt": canvasrt.__version__, "code": code_hash(sources)}


class GraphCache:
    """A folder with one graph bundle per export and per quantization."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or cache_folder()) / "graphs"

    def find(self, made_from: Mapping[str, Any], absent: Absent | None = None) -> Bundle | None:
        """Return the bundle of these inputs if it is cached and has all its files. Does not hash them.

        absent: returns the files that are allowed to be missing.
        """
        with contextlib.suppress(CanvasError):  # no bundle, or a damaged one
            return load_bundle(self.folder / key_of(made_from), "graphs", False, absent=absent)
        return None

    def get(
        self,
        made_from: Mapping[str, Any],
        make: Callable[[Path], object],
        absent: Absent | None = None,
    ) -> Bundle:
        """Return the bundle of these inputs if it is cached and intact; otherwise call `make` to write it.

        absent: returns the files that are allowed to be missing, because the engines built from them are cached.
        """
        folder = self.folder / key_of(made_from)
        remove_stale(self.folder)
        try:
            return load_bundle(folder, "graphs", hasher=known_hashes, absent=absent)
        except CanvasError:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            make(folder)
        except CanvasError:
            # If the folder exists, a concurrent build has written the same bundle.
            if not folder.is_dir():
                raise
        return load_bundle(folder, kind="graphs", check=False)


class EngineCache:
    """A folder with one subfolder per engine, named by the SHA-256 of the engine's inputs."""

    def __init__(self) -> None:
        self.folder = cache_folder() / "engines"

    def find(self, made_from: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
        """Return the engine's file and its `sha256`, `bytes` and `facts`; None if the engine or its kernel list is
        missing or damaged."""
        folder = self.folder / key_of(made_from)
        try:
            entry = json.loads((folder / _ENTRY).read_text(encoding="utf-8"))["file"]
            wanted = {_ENGINE: entry["sha256"]}
            if "kernels" in entry:
                wanted[_KERNELS] = entry["kernels"]
            if known_hashes(folder, wanted) == wanted:
                return folder / _ENGINE, entry
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def kernels(self, made_from: Mapping[str, Any]) -> Path | None:
        """Return the file of a cached engine's kernel list; None if the engine has no list."""
        file = self.folder / key_of(made_from) / _KERNELS
        return file if file.is_file() else None

    def keep(
        self,
        made_from: Mapping[str, Any],
        engine: Path,
        facts: Mapping[str, Any],
        kernels: Path | None = None,
    ) -> dict[str, Any]:
        """Store an engine's file, its kernel list and facts about it. Return the dictionary that `find` will return."""
        entry = {
            "sha256": hash_files(engine.parent, [engine.name])[engine.name],
            "bytes": engine.stat().st_size,
            "facts": dict(facts),
        }
        if kernels is not None:
            entry["kernels"] = hash_files(kernels.parent, [kernels.name])[kernels.name]
        folder = self.folder / key_of(made_from)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with staging(folder) as tmp:
                link_or_copy(engine, tmp / _ENGINE)
                if kernels is not None:
                    link_or_copy(kernels, tmp / _KERNELS)
                text = canonical({"made_from": made_from, "file": entry})
                (tmp / _ENTRY).write_text(text, encoding="utf-8")
        except CanvasError as error:
            # If the folder exists, a concurrent build has stored the same engine.
            if self.find(made_from) is None:
                raise _unusable(self.folder, error) from error
        return entry


@contextlib.contextmanager
def lock_graphs(works: Iterable[Mapping[str, Any]]) -> Iterator[None]:
    """While the block runs, no other process can build engines from the graphs of these inputs. Builds would conflict,
    because a build removes used weights and damaged graphs. Waits if another process has the lock."""
    with contextlib.ExitStack() as stack:
        # Keys are locked in sorted order, so that two processes cannot wait for each other.
        for key in sorted(set(map(key_of, works))):
            folder = cache_folder() / "builds" / key
            try:
                stack.enter_context(_locked(folder, fcntl.LOCK_NB))
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    report("waiting for another build from the same graphs")
                stack.enter_context(_locked(folder))
        yield


def unfinished_folder(kind: str, made_from: Mapping[str, Any]) -> Path:
    """Return the folder that `unfinished` yields. When the work has ended, the folder exists only if the work was
    interrupted, or if it wrote the file `keep`."""
    return cache_folder() / kind / key_of(made_from)


@contextlib.contextmanager
def unfinished(kind: str, made_from: Mapping[str, Any], keep: str = "") -> Iterator[Path]:
    """Yield a folder that keeps the progress of long work, so that work with the same inputs resumes there.

    When the block ends without an exception, the folder is removed, except for the file `keep`. Folders of interrupted
    work of the same kind stay, up to `_KEPT_BYTES` in total; the oldest are removed first. While another process works
    on the same inputs, this process waits.
    """
    own = unfinished_folder(kind, made_from)
    rooms = own.parent
    try:
        with _locked(own):
            _remove_old(each for each in rooms.iterdir() if each != own)
            yield own
            for each in own.iterdir() if (own / keep).is_file() else [own]:
                if each.name != keep:
                    shutil.rmtree(each, ignore_errors=True)
    except PermissionError as error:
        raise CanvasError(
            f"{rooms}, which keeps the progress of long work, cannot be written: {error.strerror}",
            "set CANVASRT_CACHE to a writable folder with a few GB of space",
        ) from error


def _remove_old(rooms: Iterable[Path]) -> None:
    """Keep the latest folders, up to `_KEPT_BYTES` in total, and remove all others that no process uses."""
    found: list[tuple[float, int, Path]] = []
    for room in rooms:
        with contextlib.suppress(
            OSError
        ):  # its owner has just removed a file, so the folder is in use
            files = [each.stat() for each in (room, *room.rglob("*"))]
            size = sum(each.st_size for each in files)
            found.append((max(each.st_mtime for each in files), size, room))
    left = _KEPT_BYTES
    for _, size, room in sorted(found, reverse=True):
        left -= size
        if left < 0:
            with contextlib.suppress(OSError), _locked(room, fcntl.LOCK_NB):
                shutil.rmtree(room, ignore_errors=True)


def kept_piece(piece: Path, write: Callable[[Path], None], out: Path) -> bool:
    """Put a piece of unfinished work into the folder `out`. If the piece does not exist yet, `write` writes it. Return
    whether the piece existed."""
    kept = piece.is_dir()
    if not kept:
        with staging(piece) as folder:
            write(folder)
    for file in piece.iterdir():
        link_or_copy(file, out / file.name)
    return kept


@contextlib.contextmanager
def _locked(folder: Path, how: int = 0) -> Iterator[None]:
    """Lock a folder while the block runs. Creates the folder if needed."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | how)
            except OSError as error:
                if how or error.errno not in NO_LOCKS:
                    raise
            # The previous owner may have removed the folder while this process waited.
            if folder.is_dir() and os.fstat(handle).st_ino == folder.stat().st_ino:
                yield
                return
        finally:
            os.close(handle)


def _unusable(folder: Path, error: CanvasError) -> CanvasError:
    return CanvasError(
        f"the cache {folder} cannot be used: {error.message}",
        "set CANVASRT_CACHE to a writable folder with space for graphs and engines",
    )
