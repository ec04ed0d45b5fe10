"""Finds what is installed: optional modules (a hint says how to install them), versions, and canvasrt's licence."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from canvasrt.errors import CanvasError


def require(module: str, extra: str) -> ModuleType:
    """Import a module of an optional extra. If that fails, raises CanvasError, which says how to install the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        raise CanvasError(
            f"{missing} is not installed, or its installation is broken: {error}",
            f"run `pip install 'canvasrt[{extra}]'`",
        ) from error


def is_installed(module: str) -> bool:
    """Return whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def version(distribution: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def license_text() -> str:
    """Return the installed licence's text; empty if none is installed."""
    import importlib.metadata

    try:
        files = importlib.metadata.files("canvasrt") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((str(file.read_text()) for file in files if file.name == "LICENSE"), "")
