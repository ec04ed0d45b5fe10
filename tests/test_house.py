"""The rules of the house: who may import whom, what a serving image needs, and who may print."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGES = ("export", "build", "runtime", "containers")

# From the ground up. A room only imports from lower floors, never from another room of its own
# floor.
FLOORS = (
    "errors progress defaults hashes formats option",
    "extras targets staging console checkpoints",
    "bundle machine recipes pages shapes",
    "cache graphs kernels",
    "runtime",
    "build demo",
    "export",
    "pipeline fidelity",
    "containers",
    "cli",
    "__main__ bench",
)
# The same inside the runtime and the containers.
RUNTIME = (
    "profiles passes capacity noise tables tokenizer pictures",
    "engine sampling host_head",
    "model request backends inputs candidates",
    "kv_cache gpu settled prefix host_sampler early_stop",
    "active answers",
    "cpu schedule",
    "generator",
    "open",
    "bench",
)
CONTAINERS = (
    "names untrusted",
    "options ports logs tensors processes heartbeat",
    "triton client",
    "package",
    "openai image load",
    "serve deploy",
)
# Programs whose output is their purpose.
PROGRAMS = (
    "canvasrt.build.compile",
    "canvasrt.containers.serve.build_engines",
    "canvasrt.containers.serve.probe",
    "canvasrt.demo.evaluate",
    "canvasrt.demo.train",
)


PRINTS = ("print", "sys.stdout.write", "sys.stderr.write", "os.write")


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
def imports() -> dict[str, frozenset[str]]:
    """Return which of our modules each module imports, anywhere in its code."""
    known = modules()
    graph = {}
    for name, path in known.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                each = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {full if full in known else node.module for full in each}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        # The package itself only holds its version.
        graph[name] = frozenset(found & known.keys()) - {name, "canvasrt"}
    return graph


def room(module: str, depth: int = 1) -> str:
    """Return the folder or file that a module belongs to, `depth` levels below the package."""
    parts = module.split(".")
    return parts[0] if parts[0] == "bench" else ".".join(parts[1 : depth + 1])


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


@pytest.mark.parametrize(
    ("inside", "floors"), [("", FLOORS), ("runtime", RUNTIME), ("containers", CONTAINERS)]
)
def test_no_import_leads_to_a_higher_floor(inside: str, floors: tuple[str, ...]) -> None:
    level = {name: number for number, names in enumerate(floors) for name in names.split()}
    prefix, depth = (f"{inside}.", 2) if inside else ("", 1)
    for module, imported in imports().items():
        here = room(module, depth).removeprefix(prefix)
        if inside not in ("", room(module)) or here in ("", inside):
            continue
        assert here in level, f"{module} has no floor: add it to the tables of this test"
        for each in imported:
            there = room(each, depth).removeprefix(prefix)
            if inside in ("", room(each)) and there not in (here, inside):
                assert level[there] < level[here], f"{module} imports {each}"


def test_what_runs_inside_triton_imports_nothing_of_what_runs_around_it() -> None:
    allowed = {"triton", "tensors", "names", "untrusted", "options", "heartbeat"}
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
    assert inside - {""} <= allowed


def test_only_the_command_line_prints() -> None:
    for name, path in modules().items():
        if room(name) in ("cli", "console", "bench", "__main__") or name in PROGRAMS:
            continue
        assert "canvasrt.console" not in imports()[name], f"{path} imports the console"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in PRINTS, f"{path}:{node.lineno} prints"


def test_tests_mirror_the_source_and_do_not_import_each_other() -> None:
    folders = {Path(*module.split(".")[1:-1]) for module in modules() if "." in module}
    folders |= {Path("canvasrt") / folder for folder in folders} | {
        Path(each) for each in ("bench", "canvasrt", "faults")
    }
    for path in (ROOT / "tests").rglob("*.py"):
        inside = path.relative_to(ROOT / "tests").parent
        if inside.parts and inside.parts[0] != "helpers":
            assert inside in folders, f"there is no folder {inside} for {path.name} to test"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [
                each.name for each in getattr(node, "names", ()) if isinstance(each, ast.alias)
            ]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            elif not isinstance(node, ast.Import):
                continue
            for name in names:
                if name.startswith("tests."):
                    parts = name.split(".")
                    assert not any(each.startswith("test_") for each in parts), f"{path}: {name}"


def test_the_table_of_folders_names_every_folder() -> None:
    table = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    packages = {path.parent.relative_to(ROOT) for path in modules().values()}
    others = {path.parent.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")}
    for folder in packages | others | {Path("tests"), Path("tests/helpers"), Path("tests/faults")}:
        assert f"`{folder.as_posix()}/`" in table, f"docs/design.md does not name {folder}"


# A serving image contains neither torch nor the exporter's libraries, so graphs for a CPU are
# lowered at build time.
FORBIDDEN = ("torch", "canvasrt.export", "transformers", "onnx", "onnxscript", "onnx_ir")
_CODE = f"""
import importlib, sys, types

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in {FORBIDDEN!r}):
            raise ImportError(f"{{name}} must not be imported here")

sys.meta_path.insert(0, Refuse())
# Triton itself provides this one, to the models that it runs.
class Provided(types.ModuleType):
    def __getattr__(self, name):
        return type(name, (), {{}})

sys.modules["triton_python_backend_utils"] = Provided("triton_python_backend_utils")
for name in sys.argv[1:]:
    importlib.import_module(name)
    found = [each for each in sys.modules if each in {FORBIDDEN!r}]
    assert not found, (name, found)
"""
SERVING = ("runtime", "containers", "build")


@pytest.mark.parametrize("stage", SERVING)
def test_serving_needs_neither_torch_nor_the_exporter(stage: str) -> None:
    names = sorted(name for name in modules() if room(name) == stage)
    assert len(names) > 10
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *names], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
