"""Which wheels another Linux machine can install, as options for pip."""

from __future__ import annotations

from canvasrt.containers.names import MACHINES

# tritonserver itself needs glibc 2.35, so every image has at least that.
_GLIBC = (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
_LEGACY = ("manylinux2014", "manylinux2010", "manylinux1")


def platform_options(python: str, architecture: str) -> list[str]:
    """Return pip's options for wheels of a version of Python on `amd64` or `arm64`."""
    machine = MACHINES[architecture]
    names = [*(f"manylinux_2_{minor}" for minor in _GLIBC), *_LEGACY]
    platforms = [part for name in names for part in ("--platform", f"{name}_{machine}")]
    options = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    return [*options, *platforms]
