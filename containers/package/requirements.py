"""What an image needs from PyPI: every distribution by its version, and nothing that only building needs."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from canvasrt.errors import CanvasError

# What the code in the container imports: the command line, the runtime and the front end.
_SERVING = (
    "fastapi",
    "huggingface-hub",
    "jinja2",
    "numpy",
    "pyyaml",
    "rich",
    "tokenizers",
    "tritonclient[grpc]",
    "typer",
    "uvicorn",
)
# Backend of a target → what runs its engines.
_RUNTIMES: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime",),
    "tensorrt-rtx": ("tensorrt-rtx", "cuda-bindings"),
    "tensorrt": ("tensorrt-cu13-bindings", "cuda-bindings"),
}
# Distributions that come in the versions of the engines' builder, with those that they pull in.
_OF_BUILDER = {
    "tensorrt-rtx": (
        "tensorrt-rtx",
        "tensorrt-rtx-cu13",
        "tensorrt-rtx-cu13-bindings",
        "tensorrt-rtx-cu13-libs",
    ),
    "tensorrt": ("tensorrt-cu13-bindings",),
}
# ONNX Runtime's two builds hold the same module.
_INSTEAD = {"onnxruntime": "onnxruntime-gpu"}
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Pin:
    """A distribution in one version."""

    name: str
    version: str
    license: str = ""

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def requirements(
    backends: Mapping[str, str | None], python: str, architecture: str = "amd64"
) -> list[Pin]:
    """Every distribution that an image needs for these backends, with what those need in turn.

    `backends` gives each the version of the engines' builder; without one, that of TensorRT is left out,
    since it is the base image's. All other versions are those installed here.
    """
    roots: dict[str, str] = dict.fromkeys(_SERVING, "")
    fixed: dict[str, str] = {}
    for backend, version in backends.items():
        of_builder = _OF_BUILDER.get(backend, ())
        if version is not None:
            fixed.update(dict.fromkeys(of_builder, version))
        wanted = (name for name in _RUNTIMES[backend] if name in fixed or name not in of_builder)
        roots.update(dict.fromkeys(wanted, ""))
    return sorted(_closure(roots, fixed, python, architecture), key=lambda pin: pin.name)


def _closure(
    roots: Iterable[str], fixed: Mapping[str, str], python: str, architecture: str
) -> list[Pin]:
    from packaging.requirements import Requirement

    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": _MACHINES[architecture],
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found: dict[str, Pin] = {}
    waiting = [Requirement(name) for name in roots]
    seen: set[str] = set()
    while waiting:
        wanted = waiting.pop()
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        name = canonical(wanted.name)
        if name in fixed:
            found[name] = Pin(name, fixed[name], _license(name))
            waiting += [Requirement(each) for each in fixed if each.startswith(f"{name}-")]
            continue
        metadata = _metadata(name)
        name = canonical(metadata["Name"])
        found[name] = Pin(name, metadata["Version"], _license(name))
        for line in metadata.get_all("Requires-Dist") or ():
            each = Requirement(line)
            extras = wanted.extras or {""}
            if each.marker is None or any(
                each.marker.evaluate({**environment, "extra": extra}) for extra in extras
            ):
                waiting.append(each)
    return list(found.values())


def _metadata(name: str) -> Any:
    for each in (name, _INSTEAD.get(name)):
        if each is not None:
            try:
                return importlib.metadata.metadata(each)
            except importlib.metadata.PackageNotFoundError:
                continue
    raise CanvasError(
        f"{name} is not installed here, and a package takes its version from here",
        "run `pip install 'canvasrt[cpu,serve]'`",
    )


def _license(name: str) -> str:
    """The licence of a distribution, as it declares it; empty where it is not installed here."""
    try:
        metadata: Any = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    told = metadata.get("License-Expression") or ""
    if not told:
        classifiers = [
            line.rpartition(" :: ")[2]
            for line in metadata.get_all("Classifier") or ()
            if line.startswith("License ::") and line != "License :: OSI Approved"
        ]
        told = ", ".join(classifiers) or (metadata.get("License") or "").partition("\n")[0]
    return told.strip()


def canonical(name: str) -> str:
    """The one spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()
