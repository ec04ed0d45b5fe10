"""Lists the Debian packages and Python packages in a base image."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from canvasrt.cache import cache_folder, code_hash
from canvasrt.containers.image.base import Base, BaseLayer
from canvasrt.containers.package.requirements import Installed
from canvasrt.staging import scratch, sync

_STATUS = re.compile(r"var/lib/dpkg/(?:status|status\.d/[^/]+)$")
_RELEASE = re.compile(r"(?:etc|usr/lib)/os-release$")
_PYTHON = re.compile(
    r"(?:.*/)?(?:dist|site)-packages/(?P<name>[\w.]+)-(?P<version>[^-/]+)\.(?:dist|egg)-info/METADATA$"
)
# Whiteouts. A file `.wh.NAME` deletes NAME from the layers below. A file `.wh..wh..opq` deletes the content that its
# folder has in the layers below.
_REMOVED, _EMPTIED = ".wh.", ".wh..wh..opq"


def contents(base: Base) -> list[Installed]:
    """Return the packages of a base image. Layers are read once; the result is cached.

    Raises CanvasError for a layer that does not match its digest. In that case nothing is cached.
    """
    name = f"{base.digest.removeprefix('sha256:')}-{code_hash([Path(__file__)])[:16]}"
    file = cache_folder() / "bases" / f"{name}.packages.json"
    if file.is_file():
        return [Installed(**each) for each in json.loads(file.read_text(encoding="utf-8"))]
    found = _read(base.layers)
    with scratch(file) as folder:
        whole = folder / file.name
        whole.write_text(json.dumps([asdict(each) for each in found]), encoding="utf-8")
        sync(whole)
        whole.replace(file)
    return found


def _read(layers: Iterable[BaseLayer]) -> list[Installed]:
    texts: dict[str, str] = {}
    python: dict[str, Installed] = {}
    for layer in layers:
        below = {*texts, *python}
        for name, content in _files(layer):
            below.discard(name)
            folder, _, last = name.rpartition("/")
            if last.startswith(_REMOVED):
                inside = "" if last == _EMPTIED else last.removeprefix(_REMOVED)
                deleted = f"{folder}/{inside}".strip("/")
                for each in [each for each in below if f"{each}/".startswith(f"{deleted}/")]:
                    texts.pop(each, None)
                    python.pop(each, None)
            elif match := _PYTHON.match(name):
                python[name] = Installed("pypi", match["name"], match["version"])
            elif content is not None:
                texts[name] = content.decode(errors="replace")
    release = next((text for name, text in texts.items() if _RELEASE.match(name)), "")
    distribution = re.search(r'^ID="?(\w+)"?$', release, re.MULTILINE)
    debian = (
        each
        for name, text in sorted(texts.items())
        if _STATUS.match(name)
        for each in _debian(text, distribution[1] if distribution else "debian")
    )
    return sorted({*debian, *python.values()}, key=str)


def _files(layer: BaseLayer) -> Iterator[tuple[str, bytes | None]]:
    """Yield the names of a layer's files, and the contents of files that list packages."""
    for member, archive in layer.members():
        name = member.name.removeprefix("./").lstrip("/")
        wanted = member.isfile() and (_STATUS.match(name) or _RELEASE.match(name))
        file = archive.extractfile(member) if wanted else None
        yield name, file.read() if file is not None else None


def _debian(status: str, distribution: str) -> Iterator[Installed]:
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Architecture|Status): (.*)$", paragraph, re.M))
        # Entries in status.d have no Status field; their packages are installed.
        if {"Package", "Version"} <= fields.keys() and fields.get(
            "Status", "ok installed"
        ).endswith(" installed"):
            architecture = fields.get("Architecture", "")
            yield Installed(
                f"deb/{distribution}", fields["Package"], fields["Version"], architecture
            )
