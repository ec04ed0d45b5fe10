"""Finds a tritonserver on this machine, and sets it up to run models in this Python environment."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from canvasrt import extras
from canvasrt.containers.names import CALLER_SECRET_VARIABLE, LOOPBACK
from canvasrt.containers.processes import CALLER_SECRET, child_environment
from canvasrt.errors import CanvasError

VARIABLE = "CANVASRT_TRITONSERVER"
# First safe release. In earlier releases, a single HTTP request can crash the server (CVE-2025-23310 and later).
SAFE_RELEASE = (26, 7)
_RELEASES = {"0.7.0": (24, 10)}  # nvidia-pytriton's version → Triton's release
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class Installation:
    """An installed tritonserver. `bundled` is the folder of nvidia-pytriton's server; None for any other server."""

    binary: Path
    bundled: Path | None

    @property
    def release(self) -> tuple[int, int] | None:
        """The release as year and month, as in 26.07; None if unknown."""
        if self.bundled is not None:
            return _RELEASES.get(extras.version("nvidia-pytriton") or "")
        text = os.environ.get("NVIDIA_TRITON_SERVER_VERSION", "")  # NVIDIA's images set this
        match = re.fullmatch(r"(\d\d)\.(\d\d).*", text)
        return (int(match[1]), int(match[2])) if match else None

    @property
    def is_safe(self) -> bool:
        """Whether it is safe to let other machines reach its ports."""
        return self.release is not None and self.release >= SAFE_RELEASE

    @property
    def release_text(self) -> str:
        """The release as text for messages."""
        return "an unknown release" if self.release is None else "{}.{:02}".format(*self.release)

    def check_reach(self, host: str) -> None:
        """Raise CanvasError if other machines can call `host`, and one request can crash this release."""
        if not self.is_safe and host not in LOOPBACK:
            raise CanvasError(
                f"{self.binary} is {self.release_text}, and a single request to {host} can crash it",
                "let Triton listen on 127.0.0.1, or use a tritonserver of 26.07 or later",
            )

    def prepare(self, folder: Path) -> list[str]:
        """Copy a bundled server's Python backend to `folder`; return the options that select it."""
        assert self.bundled is not None
        backends = folder / "backends"
        stub = self.bundled / "python_backend_stubs" / _python_version() / _STUB
        if not stub.exists():
            raise CanvasError(
                f"nvidia-pytriton has no Python backend for Python {_python_version()}",
                "use Python 3.11, 3.12 or 3.13, or put another tritonserver on PATH",
            )
        shutil.copytree(self.bundled / "backends" / "python", backends / "python")
        # A link, because the stub finds its libraries relative to its real path.
        (backends / "python" / _STUB).symlink_to(stub)
        return [
            f"--backend-directory={backends}",
            f"--cache-directory={self.bundled / 'caches'}",
        ]

    def environment(self) -> dict[str, str]:
        """Return tritonserver's environment: this process's environment without secrets, plus variables that let models
        run in this interpreter's virtual environment."""
        env = child_environment() | {CALLER_SECRET_VARIABLE: CALLER_SECRET}
        env["PYTHONUNBUFFERED"] = "1"
        env.setdefault("ORT_DISABLE_TELEMETRY", "1")
        # The stub finds the virtual environment through the first python3 on PATH.
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
    """Return the tritonserver in CANVASRT_TRITONSERVER, or else on PATH, or else in nvidia-pytriton.

    Raises CanvasError if there is none, or if it cannot run here.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            raise CanvasError(
                f"{VARIABLE} is {named}, which is not a program",
                f"set {VARIABLE} to the path of tritonserver, or unset it",
            )
        return _installation(Path(named))
    on_path = shutil.which("tritonserver")
    if on_path:
        return _installation(Path(on_path))
    bundled = _pytriton_folder()
    if bundled is None:
        raise CanvasError(
            "no tritonserver was found",
            'run `pip install "canvasrt[serve]"`, which includes tritonserver, or put a tritonserver on PATH',
        )
    return _installation(bundled / "bin" / "tritonserver")


def _installation(binary: Path) -> Installation:
    """Return the installation of a binary. The binary is nvidia-pytriton's if the stubs' folder is next to it."""
    folder = binary.resolve().parent.parent
    bundled = folder if (folder / "python_backend_stubs").is_dir() else None
    if bundled is not None and not _libpython_folders() and not _loads_libpython():
        version = _python_version()
        raise CanvasError(
            f"{_libpython_name()} was not found; nvidia-pytriton's Python backend needs it",
            f"install it (Debian, Ubuntu: apt install libpython{version}), or use an interpreter"
            " that includes it",
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
    """Return the folders of this interpreter that contain its shared library; empty if only the system's folders can
    contain it."""
    folders = [Path(sysconfig.get_config_var("LIBDIR") or "/nowhere")]
    folders.append(Path(sys.base_prefix) / "lib")  # relocated interpreters report a wrong LIBDIR
    return [folder for folder in dict.fromkeys(folders) if (folder / _libpython_name()).exists()]


def _loads_libpython() -> bool:
    """Return whether the dynamic linker finds libpython. Tested in a child process, so that this process
    does not load the library."""
    code = f"import ctypes; ctypes.CDLL({_libpython_name()!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
