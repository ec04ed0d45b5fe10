"""The part of TensorRT's API that the fake has, and its documentation in the real module."""

from __future__ import annotations

import inspect
import re

# Names that only the fake's classes have.
_OWN = {
    *("fake", "contexts", "config", "profile", "shapes", "addresses", "set_calls", "strategy"),
    *("device", "runtime_cache", "gpu", "known", "graph", "profiles", "compiled", "takes"),
    "per_shape",
}


def borrowed(fake: type) -> set[str]:
    """Return the names of a fake class that the real class must have."""
    return {name for name in vars(fake) if not name.startswith("_")} - _OWN


def parameters(fake: type, name: str) -> list[str] | None:
    """Return the names of the parameters of a fake's method, or None for other attributes."""
    method = vars(fake)[name]
    return list(inspect.signature(method).parameters)[1:] if inspect.isfunction(method) else None


def documented(doc: str) -> list[list[str]]:
    """Return the names of parameters, without `self`, for each signature in a real method's docstring."""
    found = [line for line in doc.splitlines() if "(self:" in line]
    heads = [re.sub(r"\[[^\[\]]*\]|<[^<>]*>", "", each.partition(") ->")[0]) for each in found]
    return [re.findall(r"(\w+): ", each.partition("(")[2])[1:] for each in heads]
