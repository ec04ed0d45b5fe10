"""Lists the TensorRT versions in Triton's images, and checks whether an image can load an engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from canvasrt.errors import CanvasError, UsageError

REPOSITORY = "nvcr.io/nvidia/tritonserver"
# The newest release in NVIDIA's release notes, and the day when they were read:
# https://docs.nvidia.com/deeplearning/triton-inference-server/release-notes/
NEWEST, READ = "26.09-py3", "2026-11-21"
# Tag → the digest of its index, from `skopeo inspect --format '{{.Digest}}' docker://REPOSITORY:TAG`.
# Empty, because the registry could not be reached on that day. `--base REPOSITORY:TAG@DIGEST` pins a digest.
DIGESTS: Mapping[str, str] = {}
DEFAULT_BASE = f"{REPOSITORY}:{NEWEST}" + (f"@{DIGESTS[NEWEST]}" if NEWEST in DIGESTS else "")
_DIGEST = re.compile(r"@sha256:([0-9a-f]{64})\Z")

# Tag of nvcr.io/nvidia/tritonserver → its TensorRT version, for tags whose version is known.
# -trtllm-python-py3: docs/introduction/compatibility.md of github.com/triton-inference-server/server.
# -py3: TRT_VERSION in the image's configuration, as published by users. NVIDIA lists all
# versions at https://docs.nvidia.com/deeplearning/frameworks/support-matrix/index.html
# Not known: 26.08-py3 and 26.09-py3. The release notes of 26.09 state CUDA 13.4.1, but refer to that page
# for TensorRT, and the page could not be read.
TENSORRT: Mapping[str, str] = {
    "26.07-py3": "11.1.0.106",
    "26.07-trtllm-python-py3": "10.14.1.48",
    "26.06-trtllm-python-py3": "10.14.1.48",
    "26.05-trtllm-python-py3": "10.14.1.48",
    "26.04-trtllm-python-py3": "10.14.1.48",
    "26.03-trtllm-python-py3": "10.14.1.48",
    "26.02-trtllm-python-py3": "10.13.3.9",
    "26.01-trtllm-python-py3": "10.13.3.9",
    "25.12-trtllm-python-py3": "10.13.3.9",
    "25.11-trtllm-python-py3": "10.13.3.9",
    "25.10-trtllm-python-py3": "10.11.0.33",
    "25.09-trtllm-python-py3": "10.11.0.33",
    "25.08-trtllm-python-py3": "10.11.0.33",
    "25.07-trtllm-python-py3": "10.10.0.31",
    "25.06-trtllm-python-py3": "10.10.0.31",
    "25.05-trtllm-python-py3": "10.9.0.34",
    "25.04-trtllm-python-py3": "10.9.0.34",
    "25.03-trtllm-python-py3": "10.9.0.34",
    "25.02-trtllm-python-py3": "10.8.0.43",
    "25.01-trtllm-python-py3": "10.8.0.43",
    "24.09-py3": "10.4.0.26",
}
# Python is 3.12 since release 24.12, and was 3.10 before (from the same page).
_PYTHON_3_12_SINCE = (24, 12)
_TRITON = re.compile(r"(?:^|/)tritonserver:(\d\d\.\d\d[^\s@]*)(?:@sha256:[0-9a-f]{64})?$")


def base_for(targets: Iterable[Mapping[str, Any] | None]) -> str:
    """Return the newest base image that has the engines' TensorRT version; if none is known, DEFAULT_BASE."""
    needed = {each["builder_version"] for each in targets if each and each["backend"] == "tensorrt"}
    fitting = [tag for tag, version in TENSORRT.items() if {version} == needed]
    return f"{REPOSITORY}:{max(fitting)}" if fitting else DEFAULT_BASE


def digest_of_name(name: str) -> str:
    """Return the SHA-256 digest in an image's name; empty if it has none. Raises UsageError for a malformed digest."""
    match = _DIGEST.search(name)
    if match is None and "@" in name:
        raise UsageError(
            f"--base is {name!r}, whose digest is malformed",
            "give NAME@sha256: and 64 hexadecimal digits in lower case",
        )
    return match[1] if match else ""


def tensorrt_of_name(name: str) -> str | None:
    """Return the TensorRT version of an NVIDIA image by its name; None if the table lacks it."""
    match = _TRITON.search(name)
    return TENSORRT.get(match[1]) if match else None


def tensorrt_of(environment: Mapping[str, str], names: Iterable[str] = ()) -> str | None:
    """Return the TensorRT version of an image from NVIDIA's environment variables or, without them, from its names."""
    version = environment.get("TRT_VERSION", "").partition("+")[0]
    return version or next((found for each in names if (found := tensorrt_of_name(each))), None)


def python_of_name(name: str) -> str | None:
    """Return the Python version of an NVIDIA image by its name; None for other images."""
    match = _TRITON.search(name)
    return python_of({"NVIDIA_TRITON_SERVER_VERSION": match[1]}) if match else None


def python_of(environment: Mapping[str, str]) -> str | None:
    """Return the Python version of a Triton image by its release; None for other images."""
    match = re.fullmatch(r"(\d\d)\.(\d\d).*", environment.get("NVIDIA_TRITON_SERVER_VERSION", ""))
    if match is None:
        return None
    return "3.12" if (int(match[1]), int(match[2])) >= _PYTHON_3_12_SINCE else "3.10"


def check_tensorrt(target: Mapping[str, Any] | None, tensorrt: str | None, image: str) -> None:
    """Raise CanvasError if an image cannot load the engines of a bundle's `target`.

    TensorRT only loads engines of exactly its own version (four numbers). TensorRT-RTX and ONNX Runtime are installed
    in the image in the version that the engines need.
    """
    if target is None or target["backend"] != "tensorrt":
        return
    needed = target["builder_version"]
    fitting = [tag for tag, version in TENSORRT.items() if version == needed]
    hint = (
        f"give --base with the tag {' or '.join(fitting)}, or build the engines with the image's TensorRT"
        if fitting
        else "build the engines with the image's TensorRT, or package the graphs instead; the container then"
        " builds the engines on its GPU at the first start"
    )
    if tensorrt is None:
        raise CanvasError(
            f"the engines for {target['name']} need TensorRT {needed}, but the version in {image} is not known",
            f"{hint}; an image on disk (--base FOLDER) declares its version",
        )
    if tensorrt != needed:
        raise CanvasError(
            f"the engines for {target['name']} were built with TensorRT {needed}, but {image} has {tensorrt},"
            " which cannot load them",
            hint,
        )
