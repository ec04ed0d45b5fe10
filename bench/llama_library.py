"""llama.cpp's C library, called in this process: `llama_decode` over a prompt, and what the library was built for."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

import numpy as np

from canvasrt.errors import CanvasError

# Parameters are structs that grow from version to version, passed by value. On x86-64, one larger than 16 bytes lies in
# memory, and the library only touches as much as it knows: a buffer that is too large works for every version.
_ROOM = 1024
_CONTEXT, _BATCH, _MICRO_BATCH = range(3)  # the first fields of llama_context_params, all uint32
_MOST_TOKENS = 512  # per pass; llama.cpp's default
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_INSTALL = "pip install xllamacpp gguf"


class _Params(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint32 * (_ROOM // 4))]


def find_library() -> Path:
    """Return the library inside the `xllamacpp` package, which is not imported."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise CanvasError("xllamacpp is not installed", _INSTALL)
    return next(Path(spec.origin).parent.glob("*.so"))


class Llama:
    """A model loaded by llama.cpp, with its defaults. Not thread-safe."""

    def __init__(self, library: Path, model: Path, threads: int) -> None:
        """Load the GGUF file `model`. `library` is libllama, or a module that contains it."""
        self._log: list[str] = []
        self._keep = _LOG(
            lambda _level, text, _data: self._log.append(text.decode("utf-8", "replace"))
        )
        lib = self._lib = _open(library)
        lib.llama_log_set(self._keep, None)
        if hasattr(lib, "ggml_backend_load_all_from_path"):
            lib.ggml_backend_load_all_from_path(str(library.parent).encode())
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            str(model).encode(), lib.llama_model_default_params()
        )
        if not self._model:
            raise CanvasError(f"llama.cpp cannot load {model}: {self._log[-1].strip()}", _INSTALL)
        params = lib.llama_context_default_params()
        params.words[_CONTEXT] = params.words[_BATCH] = params.words[_MICRO_BATCH] = _MOST_TOKENS
        self._context = lib.llama_init_from_model(self._model, params)
        sizes = [
            getattr(lib, f"llama_n_{name}")(self._context) for name in ("ctx", "batch", "ubatch")
        ]
        if sizes != [_MOST_TOKENS] * 3:
            raise CanvasError(f"llama.cpp took other sizes than {_MOST_TOKENS}: {sizes}", _INSTALL)
        lib.llama_set_n_threads(self._context, threads, threads)

    @property
    def system(self) -> str:
        """What the library was built for, in its own words, such as `AVX2 = 1 | REPACK = 1`."""
        return str(self._lib.llama_print_system_info().decode())

    @property
    def backend(self) -> str | None:
        """The CPU backend that it chose, if it has several."""
        found = re.findall(r"loaded CPU backend from \S*/(\S+)", "".join(self._log))
        return found[-1] if found else None

    @property
    def buffers(self) -> list[str]:
        """The kinds of buffers that the weights lie in, such as `CPU_REPACK`, with their sizes."""
        return re.findall(r"(\S+) model buffer size = +(\S+ MiB)", "".join(self._log))

    def forget(self) -> None:
        """Empty the cache."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def encode(self, tokens: np.ndarray) -> None:
        """Run all layers over at most 512 tokens, and the head over the last one."""
        ids = np.ascontiguousarray(tokens, np.int32)
        batch = self._lib.llama_batch_get_one(ids.ctypes.data, len(ids))
        if status := self._lib.llama_decode(self._context, batch):
            raise CanvasError(f"llama_decode returned {status}", "".join(self._log[-3:]).strip())
        self._lib.llama_synchronize(self._context)

    def hidden(self, tokens: np.ndarray) -> np.ndarray:
        """Return the normalised states after the last layer, float32 `[tokens, hidden_size]`."""
        self._lib.llama_set_embeddings(self._context, True)
        self.encode(tokens)
        shape = len(tokens), self._lib.llama_model_n_embd(self._model)
        found = np.ctypeslib.as_array(self._lib.llama_get_embeddings(self._context), shape).copy()
        self._lib.llama_set_embeddings(self._context, False)
        return found


def _open(library: Path) -> ctypes.CDLL:
    """Open the library and declare the functions used here."""
    lib = ctypes.CDLL(str(library))
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
    floats = ctypes.POINTER(ctypes.c_float)
    declared = {
        "llama_log_set": (None, [_LOG, pointer]),
        "llama_backend_init": (None, []),
        "llama_model_default_params": (_Params, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, _Params]),
        "llama_context_default_params": (_Params, []),
        "llama_init_from_model": (pointer, [pointer, _Params]),
        "llama_n_ctx": (ctypes.c_uint32, [pointer]),
        "llama_n_batch": (ctypes.c_uint32, [pointer]),
        "llama_n_ubatch": (ctypes.c_uint32, [pointer]),
        "llama_set_n_threads": (None, [pointer, number, number]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_memory_clear": (None, [pointer, flag]),
        "llama_batch_get_one": (_Params, [pointer, number]),
        "llama_decode": (number, [pointer, _Params]),
        "llama_synchronize": (None, [pointer]),
        "llama_set_embeddings": (None, [pointer, flag]),
        "llama_get_embeddings": (floats, [pointer]),
        "llama_model_n_embd": (number, [pointer]),
        "llama_print_system_info": (ctypes.c_char_p, []),
    }
    for name, (result, arguments) in declared.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib
