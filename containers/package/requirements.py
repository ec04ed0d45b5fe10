"""The distributions from PyPI that an image needs at run time, with versions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvasrt.containers.names import MACHINES
from canvasrt.errors import CanvasError

# Files for the requirements whose hashes are known, and for all other requirements.
HASHED, UNHASHED = "requirements.txt", "requirements-unhashed.txt"
# Distributions that the command line, the runtime and the front end import in the container.
_SERVING = (
    "fastapi",
    "huggingface-hub",
    "jinja2",
    "llguidance",
    "numpy",
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-sdk",
    "pillow",
    "pyyaml",
    "rich",
    "tokenizers",
    "tritonclient[grpc]",
    "typer",
    "uvicorn",
)
# A target's backend → distributions that run its engines.
_RUNTIMES: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime",),
    "tensorrt-rtx": ("tensorrt-rtx", "cuda-bindings", "nvidia-ml-py"),
    "tensorrt": ("tensorrt-cu13-bindings", "cuda-bindings", "nvidia-ml-py"),
}
# Backend → distributions that must have the version with which the engines were built.
_OF_BUILDER = {
    "tensorrt-rtx": (
        "tensorrt-rtx",
        "tensorrt-rtx-cu13",
        "tensorrt-rtx-cu13-bindings",
        "tensorrt-rtx-cu13-libs",
    ),
    "tensorrt": ("tensorrt-cu13-bindings",),
}
_PIN = re.compile(r"[a-z0-9][a-z0-9.-]*==[0-9A-Za-z][0-9A-Za-z.+!_-]* (?:[0-9a-f]{64})?")
# Distribution → another distribution of the same module, which can be installed here instead.
_INSTEAD = {"onnxruntime": "onnxruntime-gpu"}


@dataclass(frozen=True)
class Pin:
    """One version of a distribution. `sha256`: the hash of its wheel; empty if unknown. `others`: hashes of its wheels
    for the other architectures on which the package can be built."""

    name: str
    version: str
    license: str = ""
    sha256: str = ""
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def line(self) -> str:
        """The line of a requirements file. Raises CanvasError for a name, version or hash that pip would
        misinterpret."""
        if not _PIN.fullmatch(f"{self} {self.sha256}"):
            raise CanvasError(
                f"{str(self)!r} cannot be installed: it is not a valid name, version and hash",
                "build the engines again with this version of canvasrt",
            )
        hashes = (self.sha256, *self.others) if self.sha256 else ()
        return " ".join([str(self), *(f"--hash=sha256:{each}" for each in hashes)])


@dataclass(frozen=True)
class Installed:
    """A package in the base image. `kind` is `pypi`, or for example `deb/debian`."""

    kind: str
    name: str
    version: str
    architecture: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}@{self.version}:{self.architecture}"


def write_requirements(folder: Path, pins: Iterable[Pin]) -> None:
    """Write pins with and without a hash to separate files, because pip does not allow both in one file."""
    pins = list(pins)
    for name, wanted in ((HASHED, True), (UNHASHED, False)):
        lines = [f"{pin.line}\n" for pin in pins if bool(pin.sha256) == wanted]
        (folder / name).write_text("".join(lines))


def read_requirements(folder: Path) -> list[Pin]:
    """Return the pins that `write_requirements` wrote, without licences and without hashes for other architectures."""
    lines = [
        line for name in (HASHED, UNHASHED) for line in (folder / name).read_text().split("\n")
    ]
    pins = []
    for line in filter(None, lines):
        pinned, *hashes = line.split(" --hash=sha256:")
        name, _, version = pinned.partition("==")
        pins.append(Pin(name, version, sha256=hashes[0] if hashes else ""))
    return sorted(pins, key=lambda pin: pin.name)


def requirements(
    backends: Mapping[str, str | None], python: str, architecture: str = "amd64"
) -> list[Pin]:
    """Return the distributions that an image needs for these backends, and their dependencies.

    `backends` maps each backend to its builder's version. TensorRT without a version is omitted, because the base image
    provides it. All other distributions get the version installed here.
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
        "platform_machine": MACHINES[architecture],
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
        name = canonical_name(wanted.name)
        if name in fixed:
            found[name] = Pin(name, fixed[name], _license(name))
            waiting += [Requirement(each) for each in fixed if each.startswith(f"{name}-")]
            continue
        metadata = _metadata(name)
        name = canonical_name(metadata["Name"])
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
    import importlib.metadata  # slow, so `canvasrt --help` must not import it

    for each in (name, _INSTEAD.get(name)):
        if each is not None:
            try:
                return importlib.metadata.metadata(each)
            except importlib.metadata.PackageNotFoundError:
                continue
    raise CanvasError(
        f"{name} is not installed; an image gets the versions that are installed here",
        "run `pip install 'canvasrt[cpu,serve]'`",
    )


def _license(name: str) -> str:
    """Return the licence that a distribution declares; empty if it is not installed here."""
    import importlib.metadata

    try:
        metadata: Any = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    declared = metadata.get("License-Expression") or ""
    if not declared:
        classifiers = [
            line.rpartition(" :: ")[2]
            for line in metadata.get_all("Classifier") or ()
            if line.startswith("License ::") and line != "License :: OSI Approved"
        ]
        declared = ", ".join(classifiers) or (metadata.get("License") or "").partition("\n")[0]
    return declared.strip()


def canonical_name(name: str) -> str:
    """Return the normalized name of a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()
