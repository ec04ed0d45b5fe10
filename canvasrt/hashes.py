"""SHA-256 of files and of JSON. Hashes of large files are cached, because hashing 50 GB takes a minute."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from canvasrt.progress import listener

# Smaller files are always hashed, because that is as fast as looking up a cached hash.
LARGE_FILE = 1 << 24
# A file's hash is cached only if the file last changed more than this many nanoseconds ago. Until then, it could change
# again without a new timestamp.
_SETTLED = 2 * 10**9
_MOST = 4096
_CHUNK = 1 << 22

Stamp = tuple[int, ...]


def canonical(data: Mapping[str, Any]) -> str:
    """Return `data` as canonical JSON, the required form of manifests."""
    return json.dumps(data, sort_keys=True, indent=2) + "\n"


# The text of errors about a file that differs from the bundle's manifest.
DIFFERS = "differs from the manifest (SHA-256)"


def hash_files(root: Path, names: Iterable[str], doing: str = "") -> dict[str, str]:
    """Return name → SHA-256 for the files `names` under `root`. Hashes several files concurrently.

    `doing` describes the work. If it is not empty, the number of hashed bytes is reported as progress.
    """
    names, report = list(names), listener()
    total = sum((root / name).stat().st_size for name in names)
    done = 0

    def hash_one(name: str) -> str:
        nonlocal done
        digest = hashlib.sha256()
        with (root / name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                # Concurrent updates can be lost. This is harmless, because only a progress display reads the number.
                done += len(chunk)
                if doing:
                    report(doing, done, total)
        return digest.hexdigest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(hash_one, names), strict=True))


class HashMemo:
    """A cache of large files' hashes in one JSON file, keyed by inode, size and times of change.

    If a file's content changes but these values do not, as on a failing disk, the change goes unnoticed. `canvasrt
    verify` always hashes all files.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known = _read(file)

    def hash_files(self, root: Path, names: Iterable[str], doing: str = "") -> dict[str, str]:
        """Return the same as the function `hash_files`, but reuse cached hashes."""
        names = list(names)
        stamps = {name: _stamp(root / name) for name in names}
        keys = {name: _key(stamp) for name, stamp in stamps.items()}
        known = {name: self._known[keys[name]] for name in names if keys[name] in self._known}
        fresh = hash_files(root, [name for name in names if name not in known], doing)
        learned = {
            keys[name]: value
            for name, value in fresh.items()
            if _is_settled(stamps[name]) and _stamp(root / name) == stamps[name]
        }
        if learned:
            self._known |= learned
            self._save()
        return {name: known.get(name) or fresh[name] for name in names}

    def _save(self) -> None:
        """Write the cache to its file. A failure only costs time, so it is ignored."""
        latest = dict(list((_read(self._file) | self._known).items())[-_MOST:])
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=self._file.name, dir=self._file.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump(latest, out)
            os.replace(name, self._file)


def _stamp(file: Path) -> Stamp:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _key(stamp: Stamp) -> str:
    return ":".join(map(str, stamp))


def _is_settled(stamp: Stamp) -> bool:
    return stamp[2] >= LARGE_FILE and time.time_ns() - max(stamp[3:]) > _SETTLED


def _read(file: Path) -> dict[str, str]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
