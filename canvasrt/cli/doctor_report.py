"""The report of `canvasrt doctor --report`: the facts that others need to diagnose a failure."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

_LOGS, _LINES = (
    3,
    400,
)  # how many of the latest logs to include, and how many of each log's last lines
# Matches API keys of known services, and keys in Authorization headers.
_KEYS = re.compile(r"\b(?:hf_|nvapi-|sk-|Bearer\s+)[\w.~+/=-]{8,}")
# Matches names of variables that contain secrets. `SECRETS` lists those that canvasrt itself uses.
_SECRET = re.compile(r"(^|_)(SECRETS?|PASSWORD|CREDENTIALS?)(_|$)|_(KEYS?|TOKEN)$")
_HIDDEN = "[removed]"


def report() -> dict[str, Any]:
    """Return package versions, GPUs, environment variables, plans for the released model, caches, and tails of logs.

    Because the machine may be broken, a part can fail; its value is then the error."""
    parts: dict[str, Callable[[], Any]] = {
        "packages": _packages,
        "nvidia_smi": lambda: _said(["nvidia-smi"]) + _said(["nvidia-smi", "topo", "-m"]),
        "variables": lambda: _variables(os.environ),
        "plans": _plans,
        "caches": _caches,
        "logs": _logs,
    }
    return {name: _tried(part) for name, part in parts.items()}


def _tried(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception as error:
        return f"failed: {error!r}"


def _packages() -> dict[str, str]:
    """Return package → version. A package from an interrupted installation is named `None`."""
    found = {str(each.name): each.version for each in importlib.metadata.distributions()}
    return dict(sorted(found.items()))


def without_secrets(data: Any, secrets: Collection[str]) -> Any:
    """Return JSON data after removing these secrets, and everything that looks like a key, from its texts."""
    if isinstance(data, dict):
        return {name: without_secrets(each, secrets) for name, each in data.items()}
    if isinstance(data, (list, tuple)):
        return [without_secrets(each, secrets) for each in data]
    if not isinstance(data, str):
        return data
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        data = data.replace(secret, _HIDDEN)
    return _KEYS.sub(_HIDDEN, data)


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Return the secrets in environment variables and in the file of API keys."""
    from canvasrt.containers.names import SECRETS
    from canvasrt.containers.serve.settings import KEYS_FILE

    # A short value, such as 1, also occurs in texts that are not secret.
    named = [name for name, text in environment.items() if _SECRET.search(name) and len(text) > 5]
    found = [environment.get(name, "") for name in (*SECRETS, *named) if name != KEYS_FILE]
    with contextlib.suppress(KeyError, OSError, UnicodeDecodeError):
        found.append(Path(environment[KEYS_FILE]).read_text(encoding="utf-8-sig"))
    return [word for each in found for word in re.split(r"[,\s]+", each)]


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    from canvasrt.containers.names import SECRETS

    ours = re.compile(r"(NIM|CANVASRT|CUDA|NVIDIA|TRT|LD|XDG_CACHE)_")
    return {
        name: text
        for name, text in sorted(environment.items())
        if ours.match(name) and name not in SECRETS and not _SECRET.search(name)
    }


def _plans() -> list[dict[str, Any]]:
    """Return how the released model would run on the targets of this machine's GPUs."""
    from canvasrt import machine
    from canvasrt.build.fit import released_fit
    from canvasrt.targets import TARGETS

    targets = [each for each in TARGETS if machine.has_gpu(each)]
    fits = [(each.name, released_fit(each)) for each in targets]
    return [
        {"target": name, **(fit.to_json() if fit else {}), "parts": fit and fit.memory.to_json()}
        for name, fit in fits
    ]


def _caches() -> dict[str, dict[str, Any]]:
    """Return, in bytes, the free disk space of each cache folder, and the size of each file of compiled kernels."""
    from canvasrt.cache import cache_folder

    # The cache folder of a container, which `serve` passes to the model.
    named = os.environ.get("NIM_CACHE_PATH")
    found = {}
    for folder in {cache_folder(), *([Path(named).expanduser()] if named else [])}:
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(folder).free
            files = {file.name: file.stat().st_size for file in (folder / "compiled").glob("*")}
            found[str(folder)] = {"free": free, "compiled": files}
    return found


def _logs() -> dict[str, list[str]]:
    from canvasrt.containers.serve.output import last_lines
    from canvasrt.containers.serve.settings import default_log

    there = [file for file in default_log(0).parent.glob("*.log") if file.is_file()]
    files = sorted(there, key=lambda each: -each.stat().st_mtime)[:_LOGS]
    logs = {file.name: _tried(partial(last_lines, file)) for file in files}
    # Always include the first line, which is the plan.
    return {name: lines[:1] + lines[1:][-_LINES:] for name, lines in logs.items()}


def _said(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"{' '.join(command)}: {error}"]
    return (done.stdout + done.stderr).splitlines()
