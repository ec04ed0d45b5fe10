"""The file that keeps what TensorRT-RTX compiled for a GPU."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
PARTIAL = ".partial-"


class CompiledKernels:
    """TensorRT-RTX's kernel cache, which contexts share: otherwise each would compile its own kernels."""

    def __init__(self, file: Path | None) -> None:
        """file: None keeps nothing."""
        self._file = file
        self._cache: Any = None
        self._kept = 0  # bytes of the file

    def of(self, config: Any) -> Any:
        """Return the cache, made by a context's `config` the first time."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._file is not None:
                self._load(self._file)
        return self._cache

    def _load(self, file: Path) -> None:
        """Read what an earlier run compiled. TensorRT-RTX refuses what another GPU or version did."""
        for left in file.parent.glob(f"{file.name}{PARTIAL}*"):  # by a start that was killed
            left.unlink(missing_ok=True)
        if not file.is_file():
            return
        try:
            data = file.read_bytes()
        except OSError as error:
            _log.warning("cannot read compiled kernels: %s", error)
            return
        if self._cache.deserialize(data):
            self._kept = len(data)
        else:
            _log.info("%s holds kernels for another GPU, driver or version", file)

    def keep(self) -> None:
        """Write what was compiled since the last call. A full disk is a warning."""
        file = self._file
        if file is None or self._cache is None:
            return
        data = self._cache.serialize()
        if data is None:
            _log.warning("compiled kernels are not kept: TensorRT-RTX gives nothing")
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
            _log.warning("compiled kernels are not kept: %s", error)
            self._file = None  # the volume stays full
            if whole is not None:
                whole.unlink(missing_ok=True)
