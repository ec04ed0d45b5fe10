"""A name means one thing in the whole source."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.helpers.source import modules, room, tree

# Functions that do the same for another caller, so that one name is right.
ONE_MEANING = {
    "accept": "the sampler's rule, in torch for graphs and in numpy for hosts",
    "draw": "the sampler's draw, in torch for graphs and in numpy for hosts",
    "build_engines": "what a builder of engines does, for each kind of target",
    "main": "what a module does when Python runs it",
}


def named(node: ast.stmt) -> set[str]:
    """Return the public names that a statement of a module defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
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


def own_names(module: str, node: ast.stmt) -> set[str]:
    """Return the names that modules share on purpose: each has its own `log`, a command has its module's
    name, and benchmarks are programs with constants and functions of their own."""
    shared = {"log", "app"}
    if room(module) == "cli":
        shared.add(module.rpartition(".")[2])
        shared |= named(node) if is_option(node) else set()
    if room(module) == "bench" and not isinstance(node, ast.ClassDef):
        shared |= named(node)
    return shared


def homes() -> dict[str, list[str]]:
    """Return the modules that define each public name."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for node in tree(path).body:
            for name in named(node) - own_names(module, node):
                found[name].append(module)
    return found


def test_a_name_means_one_thing() -> None:
    """No two modules define a class, a type, a constant or a function of one name."""
    found = {name: where for name, where in homes().items() if len(where) > 1}
    assert {name: where for name, where in found.items() if name not in ONE_MEANING} == {}


def test_no_exception_is_left_over() -> None:
    assert {name for name in ONE_MEANING if len(homes()[name]) < 2} == set()
