"""Environments with real clients. Each is created once by an install command, and kept in the user's cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from filelock import FileLock

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "canvasrt-clients"
# uv instead of pip, which would take minutes and cannot omit a requirement.
_UV = ("pip", "install", "uv==0.13.9")
# Messages of uv, pip and npm if a registry does not answer.
_UNREACHABLE = re.compile(
    r"error sending request|from versions: none|ECONN|ENOTFOUND|EAI_AGAIN|ETIMEDOUT"
)


def environment(command: str) -> Path:
    """Return a folder in which the command, `pip install …` or `npm install …`, was run.

    Skips the test if no registry answers or npm is missing.
    """
    folder = CACHE / sha256(command.encode()).hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            manager, *arguments = command.split()
            if manager == "pip":
                _install_packages(folder, arguments)
            elif shutil.which("npm"):
                _run("npm", *arguments, cwd=folder)
            else:
                pytest.skip("npm is not installed")
            (folder / "installed").touch()
    return folder


def _install_packages(folder: Path, arguments: list[str]) -> None:
    if arguments == list(_UV[1:]):
        _run(sys.executable, "-m", "venv", ".", cwd=folder)
        _run("bin/python", "-m", *_UV, cwd=folder)
        return
    uv = str(environment(" ".join(_UV)) / "bin" / "uv")
    # torch takes gigabytes, so it is not installed. Only GuideLLM needs it, and uses the tests' copy.
    (folder / "overrides.txt").write_text("torch ; sys_platform == 'none'")
    _run(uv, "venv", "--allow-existing", "--python", sys.executable, ".", cwd=folder)
    options = ("--python", "bin/python", "--overrides", "overrides.txt")
    _run(uv, "pip", *arguments, *options, cwd=folder)


def _run(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode and _UNREACHABLE.search(done.stderr):
        pytest.skip(f"no registry answers: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
