"""The ONNX Runtime backend: the default on a CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np

# Disables the usage reports that ONNX Runtime sends since 1.31. Must be set before the import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

from canvasrt.errors import CanvasError
from canvasrt.runtime.engine import Arrays

# Passes with fewer multiply-adds are small: they take a few milliseconds on one thread, mostly outside of matrix
# products.
SMALL_PASS = 500_000_000
_PAGEOUT = 21  # Linux's MADV_PAGEOUT. Unlike MADV_DONTNEED, it keeps modified pages.


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class OrtBackend:
    """ONNX Runtime sessions on a CPU.

    threads: CPU threads in total; None uses every available core. work: multiply-adds per pass. If
    `work` is less than SMALL_PASS, every thread runs a different request's pass. Otherwise all threads work on the same
    matrix product.
    """

    rows_apart = True

    def __init__(self, threads: int | None = None, work: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise CanvasError(f"threads is {threads}", "give at least 1")
        count = threads or available_cores()
        small = work is not None and work < SMALL_PASS
        self.max_loads = count
        self._one_arena = not small
        if self._one_arena:
            _make_arena()
        self.threads = 1 if small else count
        self.max_workers = count if small else 1

    def open(self, name: str, file: Path) -> OrtSegment:
        return self._session(name, str(file), file, self._options())

    def open_bytes(self, name: str, graph: bytes, folder: Path) -> OrtSegment:
        """Load a serialized graph, whose external data is in `folder`."""
        options = self._options()
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(folder)
        )
        return self._session(name, graph, folder, options)

    def _options(self) -> ort.SessionOptions:
        options = _options(self.threads)
        if self._one_arena:
            options.add_session_config_entry("session.use_env_allocators", "1")
            # A memory pattern would allocate a pass's memory as one block, in addition to the memory of the first pass.
            options.enable_mem_pattern = False
            # The planner that reuses buffers takes time quadratic in the number of nodes. Tensors are freed after their
            # last use even without the planner.
            options.enable_mem_reuse = False
        return options

    def _session(
        self, name: str, graph: str | bytes, file: Path, options: ort.SessionOptions
    ) -> OrtSegment:
        try:
            session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions have no common base class
            raise CanvasError(
                f"ONNX Runtime cannot load {file}: {str(error).splitlines()[0]}",
                "check the bundle with `canvasrt verify`, then build it again",
            ) from error
        if self._one_arena:
            drop_pages(file.with_suffix(".bin"))
        return OrtSegment(name, session)


class OrtSegment:
    """An ONNX Runtime session as a `Segment`."""

    def __init__(self, name: str, session: ort.InferenceSession) -> None:
        self.name = name
        self.inputs = frozenset(value.name for value in session.get_inputs())
        self.outputs = tuple(value.name for value in session.get_outputs())
        self._session = session

    def run(self, feeds: Mapping[str, np.ndarray], wanted: Iterable[str] | None = None) -> Arrays:
        names = list(self.outputs if wanted is None else wanted)
        return dict(zip(names, self._session.run(names, dict(feeds)), strict=True))


def drop_pages(file: Path) -> None:
    """Release the memory of a mapped file; pages are read again when needed. Does nothing except on Linux.

    At load, ONNX Runtime reads INT4 weights and scales once to repack them, and keeps the scales mapped.
    """
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return
    libc = ctypes.CDLL(None)
    for line in maps.read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        if name == str(file.resolve()):
            begin, end = (int(each, 16) for each in span.split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _PAGEOUT)


@cache
def _make_arena() -> None:
    """Create the memory arena that all sessions share. Segments run one after another; if each had an arena, every
    session would keep its peak memory."""
    info = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    # Otherwise the arena doubles its size whenever it grows.
    exact = ort.OrtArenaCfg({"arena_extend_strategy": 1})
    ort.create_and_register_allocator(info, exact)


def _options(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Segments run one after another, so spinning threads of one session would slow the next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options
