"""`canvasrt package`: writes engines as a folder for `docker build`, or as an image."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from canvasrt.cli.field_options import with_fields
from canvasrt.cli.options import AsJson, argument, option
from canvasrt.console import emit, progress, size
from canvasrt.containers.names import MODEL_REPOSITORY
from canvasrt.containers.package.options import PackageOptions
from canvasrt.errors import UsageError

if TYPE_CHECKING:
    from canvasrt.bundle import Bundle
    from canvasrt.containers.image.build import WrittenImage

Bundles = Annotated[
    list[Path],
    argument(
        "BUNDLE", "Folders that `canvasrt build` wrote; one package can have several targets."
    ),
]
Out = Annotated[
    Path,
    option("-o, --out", "OUT", "The folder to write; with --format docker, the file."),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="NAME",
        help="context: a folder for docker build; oci: an OCI layout; docker: an archive for docker load.",
    ),
]
Base = Annotated[
    str | None,
    option(
        "--base",
        "IMAGE",
        "The base image: for context, its name; for oci and docker, a layout or an archive on disk.",
    ),
]
Python = Annotated[
    str | None,
    option(
        "--python",
        "VERSION",
        "Python version of the base image, such as 3.12, if the image's name does not tell.",
    ),
]
Sign = Annotated[
    Path | None,
    option(
        "--sign",
        "KEY",
        "Sign the image's provenance with this private key (PEM), for oci and docker.",
    ),
]


@with_fields("options", PackageOptions)
def package(
    bundles: Bundles,
    out: Out,
    options: PackageOptions,
    format: Format = "context",
    base: Base = None,
    python: Python = None,
    sign: Sign = None,
    as_json: AsJson = False,
) -> None:
    """Package engines with a Triton model repository, as an image or as a folder for `docker build`."""
    from canvasrt.containers.image.build import IMAGE_FORMATS, write_image
    from canvasrt.containers.image.oci_layout import check_tag
    from canvasrt.containers.package import package as packages
    from canvasrt.containers.package import releases

    _check(options, format, base, python, sign)
    options = replace(options, tag=check_tag(options.tag))
    with progress():
        if format in IMAGE_FORMATS:
            image = write_image(
                bundles, out, format=format, base=Path(base or ""), options=options, key=sign
            )
            data = _of_image(image, sign is not None)
        else:
            options = options.on(base or releases.DEFAULT_BASE, python)
            data = _of_context(packages.package(bundles, out, options=options))
    emit(data, lambda console: console.print("\n".join(_lines(data))))


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield a package's data as lines of text."""
    from canvasrt.containers.package import releases

    path, tag = shlex.quote(data["path"]), data["tag"]
    if data["format"] == "context":
        yield f"{path}: {size(data['bytes'])}"
        yield f"  canvasrt serve {path}"
        yield f"  docker build -t {tag} {path}"
        yield f"  canvasrt deploy {path}"
        if not data["base_pinned"]:
            base = data["base"]
            yield f"note: {base} is a tag, which may mean another image tomorrow. To pin it, give its digest:"
            yield f"  --base {base}@$(skopeo inspect --format '{{{{.Digest}}}}' docker://{base})"
            if base == releases.DEFAULT_BASE:
                yield f"  it was the newest release on {releases.READ}"
        return
    yield f"{path}: {tag}, {data['image_digest']}"
    if data["attestation"]:
        yield f"  signed provenance: {data['attestation']}"
    yield (
        f"  added to the base: {size(data['added_bytes'])}, of which {size(data['engine_bytes'])}"
        f" engines and {size(data['other_bytes'])} everything else"
    )
    if data["format"] == "docker":
        yield f"  docker load -i {path}"
    else:
        yield f"  skopeo copy oci:{path} docker://REGISTRY/{tag}"
    yield f"  canvasrt deploy {path}"


def _check(
    options: PackageOptions, format: str, base: str | None, python: str | None, sign: Path | None
) -> None:
    from canvasrt.containers.image.build import IMAGE_FORMATS
    from canvasrt.containers.package import releases

    if python is not None and not re.fullmatch(r"3\.\d+", python):
        raise UsageError(f"--python is {python!r}", "give a version such as 3.12")
    if format not in ("context", *IMAGE_FORMATS):
        raise UsageError(
            f"unknown format {format!r}",
            f"give one of context, {', '.join(IMAGE_FORMATS)}",
        )
    if format == "context" and base is not None and Path(base).expanduser().exists():
        raise UsageError(
            f"--base {base} is a file or folder, but --format context needs an image's name",
            f"load the image and give its name, or use --format {' or '.join(IMAGE_FORMATS)}",
        )
    if format in IMAGE_FORMATS and base is None:
        raise UsageError(
            f"--format {format} needs --base, an image on disk to build on",
            f"run skopeo copy docker://{releases.DEFAULT_BASE} oci:triton:base, then give --base triton;"
            " with --format context, `docker build` fetches the base",
        )
    if format not in IMAGE_FORMATS and sign is not None:
        raise UsageError(
            "--sign needs --format oci or docker: a folder for docker build is not an image yet",
            "write the image with --base and --format, or use cosign to sign the image that docker builds",
        )
    if format in IMAGE_FORMATS and options.wheels:
        raise UsageError(
            "--wheels needs --format context", "leave it out: an image includes its packages"
        )


def _of_context(made: Bundle) -> dict[str, Any]:
    from canvasrt.containers.package import releases

    path, image = made.path.resolve(), made.manifest.options["image"]
    return {
        "path": str(path),
        "format": "context",
        "tag": image["tag"],
        "digest": made.manifest.digest,
        "bytes": made.manifest.total_bytes,
        "base": image["base"],
        "base_pinned": bool(releases.digest_of_name(image["base"])),
        "model_repository": str(path / MODEL_REPOSITORY),
    }


def _of_image(made: WrittenImage, signed: bool) -> dict[str, Any]:
    from canvasrt.containers.image.attest import attestation_of

    image = made.image
    return {
        "path": str(image.path),
        "format": made.format,
        "tag": image.tag,
        "digest": made.manifest.digest,
        "image_digest": image.digest,
        "image_id": image.image_id,
        "attestation": str(attestation_of(image.path)) if signed else None,
        "base_bytes": image.base_bytes,
        "added_bytes": image.added_bytes,
        "engine_bytes": made.engine_bytes,
        "other_bytes": made.other_bytes,
        "layers": [
            {"what": layer.created_by, "digest": layer.digest, "bytes": layer.size}
            for layer in image.layers
        ],
    }
