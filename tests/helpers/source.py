"""The modules of the source: their syntax trees, and which module imports which."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAGES = ("export", "build", "runtime", "containers")

# Names entry points that run in an image, so these strings are not imports.
ENTRY_POINTS = "canvasrt.containers.package.image_settings"


def modules() -> dict[str, Path]:
    """Return every module of the package and of `bench`, by name."""
    found = {}
    for top in ("canvasrt", *STAGES, "bench"):
        for path in (ROOT / top).rglob("*.py"):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if top in STAGES:
                parts.insert(0, "canvasrt")
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    """Return a module's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def named_modules(name: str, text: str, known: Collection[str]) -> set[str]:
    """Return the module of canvasrt that a string names, or the longest beginning of it that is one."""
    text = text.removeprefix("-m")
    if name == ENTRY_POINTS or not re.fullmatch(r"canvasrt(\.\w+)+\.?", text):
        return set()
    parts = text.rstrip(".").split(".")
    starts = [".".join(parts[:count]) for count in range(len(parts), 1, -1)]
    return set([each for each in starts if each in known][:1])


def started_modules(name: str, node: ast.List | ast.Tuple) -> set[str]:
    """Return the module of the command line if these words run it by `-m canvasrt`."""
    words = [each.value if isinstance(each, ast.Constant) else "" for each in node.elts]
    asked = ("-m", "canvasrt") in pairwise(words) or "-mcanvasrt" in words
    runs = name != ENTRY_POINTS and asked
    return {"canvasrt.cli.app"} if runs else set()


@cache
def imports() -> dict[str, frozenset[str]]:
    """Return which modules of canvasrt each module imports, anywhere in its code.

    A module named in a string also counts, since it may be imported by name or run as a process.
    """
    known = modules()
    graph = {}
    for name, path in known.items():
        found = set()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                each = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {full if full in known else node.module for full in each}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= named_modules(name, node.value, known)
            elif isinstance(node, ast.List | ast.Tuple):
                found |= started_modules(name, node)
        # `canvasrt` itself contains only the version.
        graph[name] = frozenset(found & known.keys()) - {name, "canvasrt"}
    return graph


def room(module: str, depth: int = 1) -> str:
    """Return the folder or file that a module belongs to, `depth` levels below the package."""
    parts = module.split(".")
    return parts[0] if parts[0] == "bench" else ".".join(parts[1 : depth + 1])
