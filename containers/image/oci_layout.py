"""Writes an image as an OCI layout, or as an archive for `docker load` and `podman load`."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from canvasrt.containers.image.base import Base, read_base
from canvasrt.containers.image.blobs import (
    CONFIG_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Blobs,
    ImageLayer,
    Json,
    LayerEntry,
    write_tar,
)
from canvasrt.containers.package.image_settings import created
from canvasrt.errors import UsageError

_LAYOUT = {"imageLayoutVersion": "1.0.0"}


@dataclass(frozen=True)
class Image:
    """A written image. `digest`: digest of its manifest. `image_id`: digest of its configuration."""

    path: Path
    tag: str
    digest: str
    image_id: str
    base_bytes: int
    layers: tuple[ImageLayer, ...]

    @property
    def added_bytes(self) -> int:
        """Total unpacked size, in bytes, of the layers that were added to the base."""
        return sum(layer.unpacked for layer in self.layers)


def write_layout(
    folder: Path, base: Base, blobs: Blobs, layers: Sequence[ImageLayer], settings: Json, tag: str
) -> Image:
    """Complete an OCI layout in `folder`. `blobs` already contains `layers`; the base's layers are added to it.

    `settings`, in Docker's format but with `Env` as a mapping, are merged into the base's configuration.
    """
    described = base.copy_into(blobs)
    config = image_config(base, layers, settings)
    config_descriptor = blobs.add_json(config, CONFIG_TYPE)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": config_descriptor,
        "layers": [*described, *(layer.descriptor() for layer in layers)],
        "annotations": settings.get("Labels", {}),
    }
    descriptor = blobs.add_json(manifest, MANIFEST_TYPE)
    named = {
        **descriptor,
        "platform": {"architecture": config["architecture"], "os": "linux"},
        "annotations": {
            "io.containerd.image.name": _full_name(tag),
            "org.opencontainers.image.ref.name": tag.rpartition(":")[2],
        },
    }
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [named]}
    (folder / "index.json").write_text(json.dumps(index, sort_keys=True))
    (folder / "oci-layout").write_text(json.dumps(_LAYOUT))
    return Image(
        folder, tag, descriptor["digest"], config_descriptor["digest"], base.size, tuple(layers)
    )


def write_archive(layout: Path, tag: str, out: Path) -> None:
    """Pack a layout into a reproducible archive for `docker load`.

    The archive omits the layout's index. With an index, podman would ignore the health check.
    """
    manifest = json.loads((layout / _blob_name(read_base(layout).digest)).read_text())
    names = [_blob_name(each["digest"]) for each in manifest["layers"]]
    config = _blob_name(manifest["config"]["digest"])
    saved = json.dumps([{"Config": config, "RepoTags": [tag], "Layers": names}]).encode()
    blobs = [LayerEntry(name, layout / name) for name in dict.fromkeys((config, *names))]
    with out.open("wb") as file:
        write_tar(file, [*blobs, LayerEntry("manifest.json", content=saved)])


def image_config(base: Base, layers: Sequence[ImageLayer], settings: Json) -> Json:
    """Return the base's configuration with our settings merged in."""
    config = copy.deepcopy(base.config)
    moment = created()
    inner = config.setdefault("config", {}) or {}
    own = dict(settings)
    environment = {**base.environment, **_expanded(own.pop("Env", {}), base.environment)}
    inner["Env"] = [f"{name}={value}" for name, value in environment.items()]
    for name in ("Labels", "ExposedPorts"):
        inner[name] = {**(inner.get(name) or {}), **own.pop(name, {})}
    inner.update(own)
    config["config"] = inner
    config["created"] = moment
    config["rootfs"]["diff_ids"] += [layer.diff_id for layer in layers]
    config["history"] = [
        *(config.get("history") or ()),
        *({"created": moment, "created_by": layer.created_by} for layer in layers),
    ]
    for name in ("container", "container_config", "docker_version", "id", "parent"):
        config.pop(name, None)  # added by the daemon that built the base
    return config


def check_tag(tag: str) -> str:
    """Return `NAME:TAG`; the default TAG is `latest`. Raises UsageError if `tag` is not an image's name."""
    import re

    name, colon, version = tag.rpartition(":")
    if not colon or "/" in version:
        name, version = tag, "latest"
    part = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
    host = r"[A-Za-z0-9][A-Za-z0-9.-]*(?::\d+)?"
    if not re.fullmatch(rf"(?:{host}/)?{part}(?:/{part})*", name) or not re.fullmatch(
        r"\w[\w.-]{0,127}", version
    ):
        raise UsageError(
            f"{tag!r} is not a name for an image",
            "give a name in lower case, such as --tag canvasrt:1.0",
        )
    return f"{name}:{version}"


def _expanded(own: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Expand `$PATH`, as a Dockerfile would."""
    default = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    path = inherited.get("PATH", default)
    return {name: value.replace("$PATH", path) for name, value in own.items()}


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _full_name(tag: str) -> str:
    """Return the name with its registry, as containerd expects it."""
    first, slash, _ = tag.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return tag
    return f"docker.io/{tag}" if slash else f"docker.io/library/{tag}"
