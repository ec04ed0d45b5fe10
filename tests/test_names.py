"""A name means one thing in the whole source."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.helpers.source import modules, room, tree


def named(node: ast.stmt) -> set[str]:
    """Return the public names that a statement of a module defines, apart from functions."""
    if isinstance(node, ast.ClassDef):
        return {node.name} if not node.name.startswith("_") else set()
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    found = {
        each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
    }
    return {name for name in found if not name.startswith("_")}


def is_option(node: ast.stmt) -> bool:
    """Return whether a statement declares an option of the command line, for its own command."""
    return isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Annotated[")


def test_a_name_means_one_thing() -> None:
    """No two modules define a class, a type or a constant of one name. Each has its own `log`, and
    benchmarks have their own constants."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for node in tree(path).body:
            names = set() if room(module) == "cli" and is_option(node) else named(node)
            if room(module) == "bench":
                names = {name for name in names if not name.isupper()}
            for name in names - {"log", "app"}:
                homes[name].append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}
