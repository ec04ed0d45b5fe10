"""Code that prints, or that imports a module without naming it, however it is written."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TypeGuard

# What imports or runs a module without saying so.
BY_NAME = ("import_module", "__import__", "run_module", "run_path", "exec_module")
PRINTERS = {"rich", "typer", "click", "tqdm", "pprint", "argparse", "optparse", "getopt"}
# How an interpreter ends: with text instead of a number, these print it.
EXITS = ("sys.exit", "exit", "quit", "SystemExit")
# Functions that write to the terminal without naming a stream.
WRITERS = {
    "print_exc",
    "print_exception",
    "print_last",
    "print_stack",
    "StreamHandler",
    "basicConfig",
    "warn",
    "warn_explicit",
}
STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}
# What code must name in full, so that reading it tells what it takes from them.
NAMED_IN_FULL = ("sys", "os", "builtins", "importlib")
# What code could reach their contents through.
AROUND = ("__dict__", "__getattribute__", "__builtins__")

WAYS_TO_PRINT = (
    "print(1)",
    "show = print",
    "import builtins\nbuiltins.print(1)",
    "from builtins import print as show",
    "import builtins as b",
    "__builtins__['print'](1)",
    "from os import write",
    "import os\nos.write(1, b'')",
    "import os\nput = os.write",
    "import os as o",
    "import sys\nsys.stdout.write('')",
    "import sys\nprint_to = getattr(sys, 'stdout')",
    "import sys\nvars(sys)['stdout']",
    "import sys\nsys.__dict__['stderr']",
    "import sys\nsys.modules['sys'].stdout",
    "from sys import stderr",
    "import sys as s",
    "from rich import console",
    "import logging\nlogging.StreamHandler()",
    "import sys\nsys.exit('text')",
    "raise SystemExit(f'{1}')",
    "open(1, 'w')",
    "import os\nos.fdopen(2, 'w')",
    "open('/dev/stdout', 'w')",
)
WAYS_TO_IMPORT = (
    "import importlib\nimportlib.import_module(name)",
    "import importlib\nimportlib.import_module('canvasrt.' + name)",
    "from importlib import import_module as load",
    "import importlib as i",
    "import importlib\nload = importlib.import_module",
    "import importlib\ngetattr(importlib, 'import_module')('canvasrt.cli')",
    "__import__('canvasrt.cli')",
    "name = 'canvasrt.' + stage",
    "name = f'canvasrt.{stage}'",
    "name = 'canvasrt.%s' % stage",
    "name = 'canvasrt.{}'.format(stage)",
    "name = '.'.join(('canvasrt', stage))",
    "import runpy\nrunpy.run_path(path)",
)


def is_exit_code(node: ast.expr) -> bool:
    """Return whether what a program exits with is a number, as far as its source tells."""
    if isinstance(node, ast.BinOp):
        sides = (node.left, node.right)
        return any(isinstance(each, ast.Constant) and is_exit_code(each) for each in sides)
    if isinstance(node, ast.Call):
        return not isinstance(node.func, ast.Attribute) or is_exit_code(node.func)
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name | ast.Attribute)
    return isinstance(node, ast.Constant) and not isinstance(node.value, str)


def whole(tree: ast.AST) -> Iterator[ast.Name]:
    """Yield where a module of `NAMED_IN_FULL` is used as a value, and not for one thing in it."""
    used = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr":
            used.add(id(node.args[0]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in NAMED_IN_FULL and id(node) not in used:
            yield node


def renames(node: ast.AST) -> bool:
    """Return whether an import gives a module of `NAMED_IN_FULL` another name."""
    aliases = node.names if isinstance(node, ast.Import) else []
    return any(alias.asname and alias.name in NAMED_IN_FULL for alias in aliases)


def around(node: ast.AST) -> bool:
    """Return whether code reaches what a module of `NAMED_IN_FULL` holds by another way."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
        return isinstance(node.slice, ast.Constant) and node.slice.value in NAMED_IN_FULL
    if isinstance(node, ast.Attribute):
        return node.attr in AROUND and ast.unparse(node.value) in NAMED_IN_FULL
    return isinstance(node, ast.Name) and node.id in AROUND


def prints(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the pieces of code that write to the terminal, that import what does, or that could hide it."""
    yield from whole(tree)
    for node in ast.walk(tree):
        if is_code(node) and (renames(node) or around(node) or _prints(node)):
            yield node


def is_code(node: ast.AST) -> TypeGuard[ast.expr | ast.stmt]:
    return isinstance(node, ast.expr | ast.stmt)


def _prints(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id == "print"
    if isinstance(node, ast.Call):
        called, first = ast.unparse(node.func), node.args[0] if node.args else None
        if called in EXITS:
            return any(not is_exit_code(each) for each in node.args)
        opens = called.split(".")[-1] in ("open", "fdopen")
        return opens and isinstance(first, ast.Constant) and first.value in (1, 2)
    if isinstance(node, ast.Attribute):
        stream = ast.unparse(node.value) == "sys" and node.attr in STREAMS
        printed = ast.unparse(node) in ("os.write", "builtins.print")
        return stream or printed or node.attr in WRITERS
    if isinstance(node, ast.ImportFrom):
        taken, module = {alias.name for alias in node.names}, node.module or ""
        hidden = {"sys": STREAMS, "os": {"write", "fdopen"}, "builtins": {"print"}}
        return module.split(".")[0] in PRINTERS or bool(
            taken & (hidden.get(module, set()) | WRITERS)
        )
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in PRINTERS for alias in node.names)
    return isinstance(node, ast.Constant) and node.value in ("/dev/stdout", "/dev/stderr")


def hidden_imports(tree: ast.AST, spells: bool = False) -> Iterator[ast.expr | ast.stmt]:
    """Yield the pieces of code that import a module without naming it.

    Args:
        spells: whether the code may put one of our modules' names together.
    """
    yield from (node for node in whole(tree) if node.id == "importlib")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {id(call.func) for call in calls}
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
        if is_code(node) and (
            (
                isinstance(node, ast.Name | ast.Attribute)
                and name in BY_NAME
                and id(node) not in called
            )
            or (isinstance(node, ast.Call) and _imports(node))
            or (isinstance(node, ast.ImportFrom) and _renames_an_import(node))
            or (renames(node) and "importlib" in ast.unparse(node))
            or (not spells and _spells(node))
        ):
            yield node


def _imports(call: ast.Call) -> bool:
    called = ast.unparse(call.func).split(".")[-1]
    named = called == "import_module" and isinstance(call.args[0], ast.Constant)
    return called in BY_NAME and not named


def _renames_an_import(node: ast.ImportFrom) -> bool:
    return any(alias.asname and alias.name in BY_NAME for alias in node.names)


def _spells(node: ast.AST) -> bool:
    """Return whether text is the beginning of a name in our package, for the rest to follow."""
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) == "'.'.join":
        return "'canvasrt'" in ast.unparse(node.args[0])
    text = node.value if isinstance(node, ast.Constant) else ""
    return (
        isinstance(text, str) and re.fullmatch(r"canvasrt\.([\w.]*\.)?(%s|\{.*)?", text) is not None
    )
