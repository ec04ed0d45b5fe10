"""Serving profiles: the engines that a package contains or can build. Chooses a profile that this machine can run."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from canvasrt import extras, machine
from canvasrt.bundle import MANIFEST, Bundle, load_bundle
from canvasrt.containers.names import ENGINES, PACKAGE
from canvasrt.containers.package.sizes import estimate_of, sizes_of
from canvasrt.defaults import MAX_BATCH, MAX_CONTEXT
from canvasrt.errors import CanvasError, UsageError
from canvasrt.machine import Gpu
from canvasrt.targets import TARGETS, Target, find_target


@dataclass(frozen=True)
class ServingProfile:
    """Engines for one target, or graphs to build them from. `path` is the bundle's folder."""

    target: Target
    precision: str
    max_context: int
    max_batch: int
    path: Path
    digest: str
    memory: int | None  # GPU memory for serving, in bytes
    builds: bool = False
    recipe: str | None = None  # name of the quantization recipe
    startup: int = 0  # seconds until one GPU is ready
    further: int = 0  # additional seconds for each further GPU

    @cached_property
    def tags(self) -> dict[str, str]:
        """The properties that distinguish serving profiles."""
        recipe = {"recipe": self.recipe} if self.recipe else {}
        return {
            "backend": self.target.builder.replace("-", "_"),
            "precision": self.precision,
            **recipe,
            "tp": "1",
            "pp": "1",
            "target": self.target.name,
            "gpu": self.target.gpu,
            "compute_capability": self.target.capability_text,
            "max_context": str(self.max_context),
            "max_batch": str(self.max_batch),
        }

    @cached_property
    def id(self) -> str:
        """64 hexadecimal digits: the SHA-256 of the tags."""
        text = json.dumps(self.tags, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def name(self) -> str:
        """The name, for example `tensorrt-fp8-tp1-pp1`. A recipe's name replaces the precision. Profiles of different
        targets can have the same name."""
        tags = self.tags
        weights = "-".join((self.recipe or self.precision).split())
        return f"{tags['backend']}-{weights}-tp{tags['tp']}-pp{tags['pp']}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "id": self.id,
            "name": self.name,
            "tags": self.tags,
            "builds": self.builds,
            "memory": self.memory,
        }

    def misfit(self, gpus: Sequence[Gpu]) -> str:
        """Return why this machine cannot run the profile; empty if it can."""
        host = platform.machine()
        if self.target.host not in ("any", host):
            return f"needs an {self.target.host} host; this one is {host}"
        if self.target.capability is None:
            return ""
        if not gpus:
            return f"needs {self.target.gpu}; {machine.why_no_gpu()}"
        fitting = self._of_kind(gpus)
        if not fitting:
            found = ", ".join(f"{gpu.name} ({gpu.capability_text})" for gpu in gpus)
            return (
                f"needs compute capability {self.target.capability_text}; this machine has {found}"
            )
        most = max(gpu.memory for gpu in fitting)
        if self.memory is not None and self.memory > most:
            return f"needs {self.memory / 1e9:.1f} GB; the GPU has {most / 1e9:.1f} GB"
        if old := machine.old_driver(fitting):
            return old
        module, extra = machine.BUILDER_MODULES[self.target.builder]
        if not extras.is_installed(module):
            return f"needs {module}: pip install 'canvasrt[{extra}]'"
        return ""

    def gpus(self, there: Sequence[Gpu]) -> list[Gpu]:
        """Return the GPUs that can run the profile. GPUs with the target's name come first."""
        fitting = [gpu for gpu in self._of_kind(there) if (self.memory or 0) <= gpu.memory]
        return sorted(fitting, key=lambda gpu: self.target.gpu not in gpu.name)

    def _of_kind(self, gpus: Sequence[Gpu]) -> list[Gpu]:
        return [gpu for gpu in gpus if gpu.capability in self.target.capabilities]


def open_source(path: Path | None) -> Bundle:
    """Load the package, engines or graphs to serve. The default is the image's package."""
    if path is None:
        path = Path(PACKAGE)
        if not (path / MANIFEST).exists():
            raise UsageError(
                f"no bundle was given, and {path} holds no bundle",
                "give BUNDLE, or set NIM_MODEL_PATH to its folder",
            )
    # The hashes are checked later, when the model loads the engines.
    return load_bundle(path, kind=("package", "engines", "graphs"), check=False)


def profiles_of(source: Bundle) -> list[ServingProfile]:
    """Return the serving profiles of a bundle (a package, engines or graphs), the best one first.

    Raises CanvasError if a package contains no engines, for example because they are not mounted.
    """
    found = []
    for path in _bundles(source):
        bundle = load_bundle(path, kind=("engines", "graphs"), check=False)
        found += _of_bundle(bundle)
    if not found:
        raise CanvasError(
            f"{source.path} holds no engines",
            f"mount the folder that `canvasrt build` wrote at {source.path / ENGINES}",
        )
    return sorted(found, key=_preference)


def choose_profile(
    source: Bundle, wanted: str | None = None, gpus: Sequence[Gpu] | None = None
) -> ServingProfile:
    """Return the best serving profile for this machine. `wanted`: consider only profiles with this id, name or target.
    Raises CanvasError if no profile fits."""
    found = profiles_of(source)
    gpus = machine.gpus() if gpus is None else gpus
    named = [each for each in found if wanted in (None, each.id, each.name, each.target.name)]
    if not named:
        known = "; ".join(f"{each.name} for {each.target.name} ({each.id})" for each in found)
        raise CanvasError(f"unknown serving profile {wanted!r}", f"give one of {known}")
    fitting = [each for each in named if not each.misfit(gpus)]
    if not fitting:
        reasons = "; ".join(
            f"{each.name} for {each.target.name}: {each.misfit(gpus)}" for each in named
        )
        raise CanvasError(
            f"no serving profile of {source.path} runs on this machine: {reasons}",
            "build and package engines for this machine's GPU; `canvasrt targets` lists the names."
            " A container gets its GPUs with --gpus all",
        )
    names = [gpu.name for gpu in gpus]
    exact = [each for each in fitting if any(each.target.gpu in name for name in names)]
    return (exact or fitting)[0]


def _bundles(source: Bundle) -> list[Path]:
    """Return the engines' folders: the bundle itself, or the folders in a package."""
    if source.manifest.kind != "package":
        return [source.path]
    folder = source.path / ENGINES
    if (folder / MANIFEST).exists():
        return [folder]
    return sorted(each.parent for each in folder.glob(f"*/{MANIFEST}"))


def _of_bundle(bundle: Bundle) -> list[ServingProfile]:
    manifest = bundle.manifest
    if manifest.target is not None:
        return [_profile(bundle, find_target(manifest.target["name"]))]
    precision = manifest.options.get("precision", "fp32")
    if precision == "fp32":
        # A CPU can run graphs unchanged. Rewritten graphs are faster, but rewriting needs onnx.
        return [_profile(bundle, find_target("cpu"), builds=extras.is_installed("onnx"))]
    return [
        _profile(bundle, target, builds=True)
        for target in TARGETS
        if target.builder == "tensorrt" and precision in target.precisions
    ]


def _profile(bundle: Bundle, target: Target, builds: bool = False) -> ServingProfile:
    manifest = bundle.manifest
    options = manifest.options
    limit = min(manifest.model.max_position_embeddings, MAX_CONTEXT)
    precision = options.get("precision", "fp32")
    context = int(options.get("max_context") or limit)
    batch = int(options.get("max_batch") or MAX_BATCH)
    sizes = sizes_of(manifest, target)
    return ServingProfile(
        target,
        precision,
        context,
        batch,
        bundle.path,
        manifest.digest,
        None if target.capability is None else estimate_of(manifest).total,
        builds,
        (options.get("recipe") or {}).get("name"),
        sizes.startup,
        sizes.further,
    )


def _preference(profile: ServingProfile) -> tuple[bool, bool, int, str]:
    """Return a sort key: GPUs before the CPU, engines before graphs, larger GPUs before smaller ones."""
    target = profile.target
    return target.capability is None, profile.builds, -(target.memory or 0), target.name
