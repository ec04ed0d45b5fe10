"""pip's options that select wheels for another Linux machine."""

from __future__ import annotations

from canvasrt.containers.names import MACHINES

# tritonserver needs glibc 2.35, so every image has at least that version.
_GLIBC = (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
_LEGACY = ("manylinux2014", "manylinux2010", "manylinux1")


def platform_options(python: str, architecture: str) -> list[str]:
    """Return pip's options for wheels for a Python version on `amd64` or `arm64`."""
    machine = MACHINES[architecture]
    names = [*(f"manylinux_2_{minor}" for minor in _GLIBC), *_LEGACY]
    platforms = [part for name in names for part in ("--platform", f"{name}_{machine}")]
    options = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    return [*options, *platforms]
