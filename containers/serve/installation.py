"""Finds a tritonserver on this machine, and what it needs to run this interpreter's models."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from canvasrt.errors import CanvasError

VARIABLE = "CANVASRT_TRITONSERVER"
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class Installation:
    """A tritonserver. `bundled` is the folder in nvidia-pytriton's wheel, None for any other."""

    binary: Path
    bundled: Path | None

    def prepare(self, folder: Path) -> list[str]:
        """Puts a bundled server's backend into `folder`; the options that make it use that."""
        assert self.bundled is not None
        backends = folder / "backends"
        stub = self.bundled / "python_backend_stubs" / _python_version() / _STUB
        if not stub.exists():
            raise CanvasError(
                f"nvidia-pytriton has no Python backend for Python {_python_version()}",
                "use Python 3.11, 3.12 or 3.13, or put another tritonserver on PATH",
            )
        shutil.copytree(self.bundled / "backends" / "python", backends / "python")
        # A link and not a copy: the stub finds its libraries relative to where it really lies.
        (backends / "python" / _STUB).symlink_to(stub)
        return [
            f"--backend-directory={backends}",
            f"--cache-directory={self.bundled / 'caches'}",
        ]

    def environment(self) -> dict[str, str]:
        """This process's environment, changed so that the models run in this interpreter's one."""
        env = dict(os.environ)
        env["PYTHONUNBUFFERED"] = "1"
        env.setdefault("ORT_DISABLE_TELEMETRY", "1")
        # The stub finds its virtual environment by the first python3 on PATH.
        bin_folder = str(Path(sys.executable).parent)
        env["PATH"] = os.pathsep.join([bin_folder, env.get("PATH", os.defpath)])
        if self.bundled is not None:
            libraries = [str(folder) for folder in _libpython_folders()]
            if env.get("LD_LIBRARY_PATH"):
                libraries.append(env["LD_LIBRARY_PATH"])
            if libraries:
                env["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
        return env


def find_installation() -> Installation:
    """`CANVASRT_TRITONSERVER`, else the one on PATH, else nvidia-pytriton's.

    CanvasError when there is none, or it cannot run here.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            raise CanvasError(
                f"{VARIABLE} is {named}, which is not a program",
                f"name the tritonserver program, or unset {VARIABLE}",
            )
        return _installation(Path(named))
    on_path = shutil.which("tritonserver")
    if on_path:
        return _installation(Path(on_path))
    bundled = _pytriton_folder()
    if bundled is None:
        raise CanvasError(
            "no tritonserver was found",
            'run `pip install "canvasrt[serve]"`, which carries one, or put one on PATH',
        )
    return _installation(bundled / "bin" / "tritonserver")


def _installation(binary: Path) -> Installation:
    """With the stub's folders beside it, the binary is nvidia-pytriton's, however it was found."""
    folder = binary.resolve().parent.parent
    bundled = folder if (folder / "python_backend_stubs").is_dir() else None
    if bundled is not None and not _libpython_folders() and not _loads_libpython():
        version = _python_version()
        raise CanvasError(
            f"{_libpython_name()} was not found, and nvidia-pytriton's Python backend loads it",
            f"install it (Debian, Ubuntu: apt install libpython{version}), or use an interpreter"
            " that carries it",
        )
    return Installation(binary, bundled)


def _pytriton_folder() -> Path | None:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "tritonserver"
    return folder if (folder / "bin" / "tritonserver").exists() else None


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _libpython_name() -> str:
    return f"libpython{_python_version()}.so.1.0"


def _libpython_folders() -> list[Path]:
    """Where this interpreter's shared library lies; empty when only the system's own could do."""
    folders = [Path(sysconfig.get_config_var("LIBDIR") or "/nowhere")]
    folders.append(Path(sys.base_prefix) / "lib")  # relocated interpreters have a wrong LIBDIR
    return [folder for folder in dict.fromkeys(folders) if (folder / _libpython_name()).exists()]


def _loads_libpython() -> bool:
    """Whether the dynamic linker finds it by itself; asked in another process, not to load it here."""
    code = f"import ctypes; ctypes.CDLL({_libpython_name()!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
