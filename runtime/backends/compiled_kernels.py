"""The file with the kernels that TensorRT-RTX compiled for a GPU."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
PARTIAL = ".partial-"
# A file is removed once this many seconds have passed since its last write or use. LEFT applies to partial files, which
# another server may still be writing. UNUSED applies to all other files.
LEFT, UNUSED = 600, 30 * 86400


class CompiledKernels:
    """TensorRT-RTX's kernel cache. All execution contexts share it, so a kernel is compiled only once."""

    def __init__(self, file: Path | None) -> None:
        """file: where kernels are stored; None stores nothing."""
        self._file = file
        self._cache: Any = None
        self._kept = 0  # size of the stored cache in bytes

    def of(self, config: Any) -> Any:
        """Return the cache. The first call creates it with a context's `config`."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._file is not None:
                self._load(self._file)
        return self._cache

    def _load(self, file: Path) -> None:
        """Read the kernels of an earlier run. TensorRT-RTX refuses kernels of another GPU or version."""
        try:
            self._prune(file)
            data = file.read_bytes()
        except FileNotFoundError:  # the first start
            return
        except OSError as error:
            _log.warning("cannot read compiled kernels: %s", error)
            return
        if self._cache.deserialize(data):
            self._kept = len(data)
        else:
            _log.info("%s holds kernels for another GPU, driver or version", file)

    @staticmethod
    def _prune(file: Path) -> None:
        """Remove partial files of starts that were killed, and kernels that are no longer used. On a read-only volume,
        nothing is removed."""
        with suppress(OSError):
            os.utime(file)  # marks the file as used
        for each in file.parent.glob("*"):
            with suppress(OSError):
                if time.time() - each.stat().st_mtime > (LEFT if PARTIAL in each.name else UNUSED):
                    each.unlink()

    def keep(self) -> None:
        """Write the kernels compiled since the last call. A full disk only causes a warning."""
        file = self._file
        if file is None or self._cache is None:
            return
        data = self._cache.serialize()
        if data is None:
            _log.warning("compiled kernels are not stored: TensorRT-RTX returns no data")
            return
        if (size := memoryview(data).nbytes) == self._kept:  # nothing was compiled since
            return
        self._kept = size
        whole: Path | None = None
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=file.name + PARTIAL, dir=file.parent)
            whole = Path(name)
            with open(descriptor, "wb") as out:
                out.write(data)
            whole.replace(file)
        except OSError as error:
            _log.warning("compiled kernels are not stored: %s", error)
            self._file = None  # do not try again: the disk stays full
            if whole is not None:
                with suppress(OSError):
                    whole.unlink()
