"""A name means one thing in the whole source."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.helpers.source import modules, room, tree

# Functions that do the same for another caller, so that one name is right.
ONE_MEANING = {
    "accept": "the sampler's rule, in torch for graphs and in numpy for hosts",
    "draw": "the sampler's draw, in torch for graphs and in numpy for hosts",
    "build_engines": "what a builder of engines does, for each kind of target",
    "main": "what a module does when Python runs it",
}
# Modules of one name in several folders: why one name is right.
ONE_SUBJECT = {
    "app": "the application: of the command line, and of the OpenAI front end",
    "checks": "what a stage refuses before it starts",
    "cpu": "the CPU: how engines are built for it, and how it runs them",
    "decisions": "decisions: as HTTP asks for them, as Triton answers them, and how good they are",
    "errors": "the errors that callers get: everywhere, and in OpenAI's format",
    "grammar": "grammars: how they constrain an answer, and how Triton makes them",
    "host_head": "the head on a host: its files, and its computation",
    "metrics": "a process's metrics: the front end's, and the worker's inside Triton",
    "model": "the network: as the demo trains it, and as an engine runs it",
    "options": "the options of what the folder is for",
    "replies": "what a caller gets: as tensors from Triton, as JSON from the front end",
    "report": "a report as plain data",
    "request": "what a caller asks for: of the runtime, and as Triton's tensors",
    "serving_profiles": "serving profiles: which exist and fit, and the commands about them",
    "table": "the embedding table: in a graph, and quantized",
    "tensorrt": "TensorRT: building its engines, and running them",
    "tokenize": "encoding without an answer: inside Triton, and over HTTP",
    "tokenizer": "tokenizers: reading one, and making the demo's",
    "weights": "a checkpoint's weights: as graphs need them, and compared with a bundle's",
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


def module_homes() -> dict[str, list[str]]:
    """Return the modules of each name.

    The module of a command has the command's name. Benchmarks are programs of their own.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        name = module.rpartition(".")[2]
        is_command = room(module) == "cli" and any(name in named(each) for each in tree(path).body)
        if path.name not in ("__init__.py", "__main__.py") and room(module) != "bench":
            found[name] += [] if is_command and name not in ONE_SUBJECT else [module]
    return found


def test_a_module_name_means_one_thing() -> None:
    found = {name: where for name, where in module_homes().items() if len(where) > 1}
    assert {name: where for name, where in found.items() if name not in ONE_SUBJECT} == {}


@pytest.mark.parametrize(
    ("allowed", "found"), [(ONE_MEANING, homes()), (ONE_SUBJECT, module_homes())]
)
def test_no_exception_is_left_over(allowed: dict[str, str], found: dict[str, list[str]]) -> None:
    assert {name for name in allowed if len(found[name]) < 2} == set()
