"""Rules for the code: which modules may import which, which may print, how long they may be, and what a serving image
needs."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from canvasrt.cli.app import COMMANDS
from tests.helpers.source import ROOT, STAGES, imports, modules, room, tree
from tests.mutate import CHANGES

# The floors of the code, lowest first. A folder imports only from lower floors, never from another folder of the same
# floor.
FLOORS = (
    "progress",
    "errors types defaults chat_tokens children hashes formats option watch",
    "extras targets staging console checkpoints",
    "expert_slots",
    "bundle machine recipes pages pass_shapes",
    "engine_profiles nvml",
    "cache graphs roofline",
    "sorted_rows",
    "runtime",
    "calibration_prompts demo",
    "build export",
    "pipeline fidelity",
    "containers",
    "cli",
    "__main__ bench",
)
# Programs that exist to write output.
PROGRAMS = (
    "canvasrt.build.compile",
    "canvasrt.containers.serve.build_engines",
    "canvasrt.containers.serve.probe",
    "canvasrt.containers.triton.sandbox_process",
)


# Modules that import a module by a name given at run time: extras, TensorRT, and commands.
IMPORTERS = (
    "canvasrt.extras",
    "canvasrt.build.compile",
    "canvasrt.cli.app",
    "bench.__main__",
)
# The only module that may write logs to a stream.
LOGS = "canvasrt.containers.logs"
MAX_LINES = 400


# Calls that import or run a module by a name, and calls that write to the terminal.
BY_NAME = ("import_module", "__import__", "run_module", "run_path", "exec_module")
PRINTERS = {"rich", "typer", "click", "tqdm", "pprint", "argparse", "optparse", "getopt"}
WRITERS = {"print", "os.write", "traceback.print_exc", "warnings.warn", "logging.basicConfig"}
WRITERS |= {f"sys.{stream}" for stream in ("stdout", "stderr", "__stdout__", "__stderr__")}
WRITERS |= {"logging.StreamHandler"}


def prints(code: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield code that writes to the terminal, or that imports modules which write to it."""
    for node in ast.walk(code):
        taken: set[str] = set()
        if isinstance(node, ast.Name | ast.Attribute):
            taken = {ast.unparse(node)}
        elif isinstance(node, ast.Import):
            taken = {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            taken = {str(node.module), *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.exit", "SystemExit"):
            # Both f-strings and other strings print text.
            text = any(isinstance(each, ast.JoinedStr) or _is_text(each) for each in node.args)
            taken = {"print"} if text else set()
        if taken & WRITERS or {each.partition(".")[0] for each in taken} & PRINTERS:
            assert isinstance(node, ast.expr | ast.stmt)
            yield node


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def hidden_imports(code: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that import a module whose name is only known at run time."""
    for node in ast.walk(code):
        called = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or called not in BY_NAME:
            continue
        if called != "import_module" or not _is_text(node.args[0]):
            yield node


def test_imports_can_be_read_from_the_source() -> None:
    for name, path in modules().items():
        if name not in IMPORTERS:
            for node in hidden_imports(tree(path)):
                raise AssertionError(f"{path}:{node.lineno} imports a module without naming it")


def test_every_folder_of_code_is_known() -> None:
    """A new folder must be in this file's tables and in the table of `docs/design.md`."""
    folders = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and any(path.glob("**/*.py"))
    }
    assert folders == {"canvasrt", *STAGES, "bench", "tests"}
    described = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for folder in {path.parent.relative_to(ROOT) for path in modules().values()}:
        assert f"| `{folder}/` |" in described, f"docs/design.md does not list {folder}/"


def test_there_is_no_circle_of_imports() -> None:
    graph, done = imports(), set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module not in done:
            for each in sorted(graph[module]):
                visit(each, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_no_import_leads_to_a_higher_floor() -> None:
    level = {name: number for number, names in enumerate(FLOORS) for name in names.split()}
    for module, imported in imports().items():
        here = room(module)
        if not here:
            continue
        assert here in level, f"{module} has no floor: add it to the table of this test"
        for each in imported:
            there = room(each)
            if there not in ("", here):
                assert level[there] < level[here], f"{module} imports {each}"


def test_commands_do_not_import_each_other() -> None:
    """`app` loads a command's module by name when the command runs."""
    names = {f"canvasrt.cli.{name.replace('-', '_')}" for name in COMMANDS}
    for name in names & imports().keys():
        assert not imports()[name] & names, f"{name} imports another command"


INSIDE_TRITON = {"triton", "tensors", "names", "untrusted", "heartbeat", "logs"}


def test_what_runs_inside_triton_imports_nothing_of_what_runs_around_it() -> None:
    seen, todo = (
        set(),
        [name for name in modules() if name.startswith("canvasrt.containers.triton")],
    )
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += imports()[module]
    inside = {room(each, 2).partition(".")[2] for each in seen if room(each) == "containers"}
    assert inside - {""} <= INSIDE_TRITON


def test_triton_loads_nothing_of_the_pipeline() -> None:
    """Checks which modules a Triton process has loaded after it imported its models."""
    names = [name for name in modules() if name.startswith("canvasrt.containers.triton")]
    loaded = imported_together(names, ())
    assert "canvasrt.containers.triton.worker" in loaded
    rooms = {room(each) for each in loaded if each.startswith("canvasrt.")}
    around = {
        "export",
        "build",
        "pipeline",
        "cli",
        "console",
        "demo",
        "fidelity",
        "graphs",
        "recipes",
    }
    assert not rooms & around
    inside = {room(each, 2).partition(".")[2] for each in loaded if room(each) == "containers"}
    assert inside - {""} <= INSIDE_TRITON


def test_only_the_command_line_prints() -> None:
    for name, path in modules().items():
        if room(name) in ("cli", "console", "bench", "__main__") or name in PROGRAMS:
            continue
        assert "canvasrt.console" not in imports()[name], f"{path} imports the console"
        if name != LOGS:
            for node in prints(tree(path)):
                raise AssertionError(f"{path}:{node.lineno} prints")


@pytest.mark.parametrize(
    "code",
    [
        "print(1)",
        "import sys\nsys.stdout.write('')",
        "from sys import stderr",
        "from rich import console",
        "import rich.console",
        "raise SystemExit(f'{1}')",
        "import os\nput = os.write",
    ],
)
def test_ways_to_print_are_seen(code: str) -> None:
    assert list(prints(ast.parse(code)))


def test_ways_to_import_are_seen() -> None:
    for code in ("importlib.import_module('canvasrt.' + name)", "__import__(name)"):
        assert list(hidden_imports(ast.parse(code)))


def hints(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the hints of a module's errors and their lines, with `…` for values filled in at run time."""
    for node in ast.walk(tree(path)):
        called = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
        if called in ("CanvasError", "UsageError") and len(node.args) > 1:
            hint = node.args[1]
            parts = hint.values if isinstance(hint, ast.JoinedStr) else [hint]
            texts = [str(each.value) if isinstance(each, ast.Constant) else "…" for each in parts]
            yield "".join(texts), hint.lineno


def test_hints_are_phrases() -> None:
    """A hint follows `hint: ` or is part of a sentence in an API's reply, so it has no capital letter and no period."""
    for path in modules().values():
        for hint, line in hints(path):
            where = f"{path}:{line} has the hint {hint!r}"
            assert not hint.endswith("."), where
            assert not re.match("[A-Z][a-z]", hint), where


def test_modules_are_short() -> None:
    for path in (*modules().values(), *(ROOT / "tests").rglob("*.py")):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines < MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines: split it"


def test_test_modules_do_not_import_each_other() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                assert not re.match(r"tests\.(.*\.)?test_", name), f"{path}: {name}"


# Modules that a serving image lacks. Graphs for a CPU are lowered at build time, so the runtime does not need them.
FORBIDDEN = ("torch", "canvasrt.export", "transformers", "onnx", "onnxscript", "onnx_ir")
_CODE = """
import importlib, json, sys, types

refused, names = json.loads(sys.argv[1]), sys.argv[2:]

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in refused):
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Refuse())
# Triton itself provides this one, to the models that it runs.
class Provided(types.ModuleType):
    def __getattr__(self, name):
        return type(name, (), {})

sys.modules["triton_python_backend_utils"] = Provided("triton_python_backend_utils")
for name in names:
    importlib.import_module(name)
print(*sys.modules, sep="\\n")
"""
SERVING = ("runtime", "containers", "build")


def imported_together(names: Collection[str], refused: Collection[str]) -> set[str]:
    """Import modules in a process in which importing `refused` modules fails; return all modules that it loaded."""
    command = [sys.executable, "-c", _CODE, json.dumps(refused), *sorted(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stdout.split())


@pytest.mark.parametrize("stage", SERVING)
def test_serving_needs_neither_torch_nor_the_exporter(stage: str) -> None:
    names = [name for name in modules() if room(name) == stage]
    assert len(names) > 10
    assert not imported_together(names, FORBIDDEN) & set(FORBIDDEN)


def test_every_test_is_collected(request: pytest.FixtureRequest) -> None:
    """By default, pytest would skip `tests/build`."""
    skipped = request.config.getini("norecursedirs")
    folders = {file.parent.relative_to(ROOT) for file in (ROOT / "tests").rglob("test_*.py")}
    parts = {part for folder in folders for part in folder.parts}
    assert "build" in parts
    assert not [part for part in parts for pattern in skipped if fnmatch.fnmatch(part, pattern)]


def test_every_breakage_of_mutate_is_still_in_the_code() -> None:
    texts = {file: (ROOT / f"{file}.py").read_text() for _, file, *_ in CHANGES}
    assert not [what for what, file, old, *_ in CHANGES if texts[file].count(old) != 1]
