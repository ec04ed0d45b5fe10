"""A new server option, or a new request field, touches few places."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from canvasrt.containers.openai.body import OWN
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.errors import CanvasError

ROOT = Path(__file__).parents[2]
SERVING = [*(ROOT / "containers").rglob("*.py"), *(ROOT / "canvasrt" / "cli").rglob("*.py")]
# These describe a manifest, or set the reference up; they pass nothing on.
REPORTS = {
    *("canvasrt/cli/inspect.py", "canvasrt/cli/bench.py", "canvasrt/cli/against.py"),
    "canvasrt/cli/bench_options.py",
    "canvasrt/cli/verify.py",  # a question type's fitted temperature
    # The model's canvas_length.
    *("containers/serve/serve.py", "containers/triton/backend.py"),
    *("containers/batch/local.py", "containers/openai/app.py"),
    # Bodies in OpenAI's form have other names for them.
    *("containers/openai/infill.py", "containers/openai/response_events.py"),
    "containers/openai/vllm_fields.py",  # vLLM has other names for them
    # Calls are only enforced without fields that cannot be combined with a grammar.
    "containers/openai/tools.py",
}
# Replies have fields of these names, too.
IN_REPLIES = ("logprobs", "top_logprobs")

_REPLACED = """
import sys, types
from pathlib import Path

def replace(name, line, new):
    '''Load a module with a line added after another.'''
    import importlib.util
    spec = importlib.util.find_spec(name)
    text = Path(spec.origin).read_text()
    assert text.count(line) == 1, line
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(text.replace(line, line + new), spec.origin, "exec"), module.__dict__)
"""
_NEW_FIELD = (
    _REPLACED
    + """
replace(
    "canvasrt.runtime.sampling_params",
    "    seed: int =",
    ' _parameter(0, "UINT64", "seed", most=MAX_UINT64)\\n'
    '    haste: float = _parameter(0.5, "FP32", "how fast to go")\\n    unused: int =',
)
from canvasrt.cli.app import parsed_command, run
from canvasrt.containers.openai.body import read_body
from canvasrt.containers.openai.chat import ChatRequest, chat_generation
from canvasrt.containers.openai.generation import answer_inputs
from canvasrt.containers.package.repository import model_config
from canvasrt.containers.tensors import STREAM_MODEL, inputs_of
from canvasrt.containers.triton.request import OPTIONS

assert ("haste", "FP32") in [(each.name, each.datatype) for each in inputs_of(STREAM_MODEL)]
assert "haste" in [each.name for each in OPTIONS]
assert 'name: "haste" data_type: TYPE_FP32' in model_config(STREAM_MODEL, {})
body = b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "haste": 0.75}'
assert answer_inputs(chat_generation(read_body(ChatRequest, body)))[0]["haste"] == 0.75
for command in ("generate", "infer"):
    assert "--haste" in [name for each in parsed_command(command).params for name in each.opts]
assert run(["infer", "x", "--haste", "nan"]) == 2
"""
)
_NEW_OPTION = (
    _REPLACED
    + """
replace(
    "canvasrt.containers.triton.options",
    "models inside Triton, which read them from environment variables.\\"\\"\\"\\n\\n",
    "    haste: int = field(default=1,"
    ' metadata=option("How fast.", least=1, variable="NIM_HASTE", read=read_count))\\n',
)
from canvasrt.cli.app import parsed_command
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.containers.serve.installation import find_installation
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.settings import read_settings

for given in (({"haste": 7}, {}, {}), ({}, {"haste": 7}, {}), ({}, {}, {"NIM_HASTE": "7"})):
    settings = read_settings(*given)
    server = Server(Path("repository"), model=settings.model)
    environment = server._environment(find_installation(), Path("scratch"))
    assert ModelOptions.from_environment(environment).haste == 7
(found,) = [each for each in parsed_command("serve").params if each.name == "haste"]
assert (found.opts, found.help) == (["--haste"], "How fast; NIM_HASTE.")
"""
)
# An option that `canvasrt deploy` also takes and the compose file passes on.
_NEW_CONTAINER_OPTION = (
    _REPLACED
    + """
replace(
    "canvasrt.containers.names",
    "CONTAINER_VARIABLES: dict[str, Callable[[str], str]] = {\\n",
    '    "CANVASRT_HASTE": lambda name: f"2 for {name}",\\n    "CANVASRT_WASTE": lambda name: "",\\n',
)
replace(
    "canvasrt.containers.openai.options",
    '    host: str = field(\\n        default="127.0.0.1",\\n',
    '        metadata=option("Where."))\\n    haste: str = field(default="1",'
    ' metadata=option("How fast.", variable="CANVASRT_HASTE", read=str))\\n    there: str = field(default="",',
)
import contextlib, io
from canvasrt.cli.app import parsed_command, run
from canvasrt.containers.deploy.options import DeployOptions
from canvasrt.containers.package.render import render_files
from canvasrt.containers.package.image_settings import ImageSettings
from canvasrt.containers.serve.settings import read_settings

assert read_settings({}, {}, {"CANVASRT_HASTE": "7"}).front.haste == "7"
(found,) = [each for each in parsed_command("deploy").params if each.name == "haste"]
assert (found.opts, found.help) == (["--haste"], "How fast; CANVASRT_HASTE.")
assert found.show_default == "2 for NAME, on loopback"
assert DeployOptions(name="me").environment["CANVASRT_HASTE"] == "2 for me"
assert "CANVASRT_HASTE" not in DeployOptions(listen="0.0.0.0").environment
assert "CANVASRT_WASTE" not in DeployOptions().environment
with contextlib.redirect_stdout(io.StringIO()) as printed:
    assert run(["deploy", "p", "--print", "--haste", "7"]) == 0
assert "--env CANVASRT_HASTE=7" in printed.getvalue()
facts = dict.fromkeys(("base", "tag", "tensorrt", "tensorrt_version", "bindings", "unhashed"), "x")
facts |= {"settings": ImageSettings({}, gpu=False), "engines": []}
compose = render_files(facts)["compose.yaml"]
assert "      CANVASRT_HASTE: ${CANVASRT_HASTE:-2 for canvasrt}\\n" in compose
assert "      CANVASRT_WASTE: ${CANVASRT_WASTE:-}\\n" in compose
"""
)


def files_with(name: str) -> set[str]:
    """The modules of serving and of the command line that contain a word."""
    word = re.compile(rf"\b{name}\b")
    return {
        path.relative_to(ROOT).as_posix()
        for path in SERVING
        if word.search(path.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize("name", [each.name for each in OWN if each.name not in IN_REPLIES])
def test_serving_passes_request_fields_on_without_their_names(name: str) -> None:
    assert files_with(name) <= REPORTS


@cache
def options_read() -> dict[str, set[str]]:
    """The modules that read each option: as `options.NAME`, or `settings.front.NAME`."""
    found: dict[str, set[str]] = {}
    # The options of deploy share some names.
    for path in (each for each in SERVING if "deploy" not in each.parts):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value).rpartition(".")[2]
                if owner.removeprefix("_") in ("options", "front", "model"):
                    found.setdefault(node.attr, set()).add(path.relative_to(ROOT).as_posix())
    return found


@pytest.mark.parametrize("name", [each.name for each in fields(ModelOptions)])
def test_the_model_alone_reads_its_options(name: str) -> None:
    # Callers read the context's length; a batch runs engines without a server.
    around = {"containers/serve/serve.py"} if name == "max_model_len" else set()
    inside = options_read()[name] - around - {"containers/batch/local.py"}
    assert len(inside) == 1
    assert inside <= {"containers/triton/backend.py", "containers/triton/request.py"}


# The supervisor's own uses of the front end's options: opening ports, reporting addresses and names, and the log's format.
_SUPERVISOR = {"host", "port", "health_port", "names", "log_level", "json_logs", "keys", "tls"}


@pytest.mark.parametrize("name", [each.name for each in fields(FrontOptions)])
def test_the_front_end_alone_reads_its_options(name: str) -> None:
    readers = options_read()[name]
    outside = {each for each in readers if not each.startswith("containers/openai/")}
    if name not in _SUPERVISOR:
        # The server's description is no option, and is also read where it is shown. Bodies are bounded on all ports.
        several = {
            "about": ("about", "app", "ollama_models"),
            "max_body": ("app", "triton_grpc", "triton_http"),
        }
        known = {f"containers/openai/{each}.py" for each in several.get(name, ())}
        assert readers == known if known else len(readers) == 1
        assert not outside


@pytest.mark.parametrize(
    "code", [_NEW_FIELD, _NEW_OPTION, _NEW_CONTAINER_OPTION], ids=["field", "option", "container"]
)
def test_a_new_one_arrives_without_a_change_elsewhere(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_option_that_containers_set_touches_four_files() -> None:
    """The files that list the chart's values are not counted. `docs/contributing.md` names them all."""
    known = re.compile("allowed.?hosts", re.IGNORECASE)
    folders = [ROOT / each for each in ("canvasrt", "containers", "runtime")]
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in (".py", ".tpl", ".yaml", ".json", "") and path.is_file()
        if known.search(path.read_text(encoding="utf-8"))
    }
    values = {each for each in found if Path(each).name.startswith("values")}
    assert len(found - values) == 4
    contributing = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    for each in found:
        assert f"`{each}`" in contributing


def test_options_survive_the_environment_and_json() -> None:
    options = ModelOptions(threads=3, max_model_len=64, share_passes="on")
    assert ModelOptions.from_environment(options.to_environment()) == options
    assert ModelOptions.from_environment({}) == ModelOptions()
    for value in ("many", "1.5", '"3"'):
        with pytest.raises(CanvasError, match="CANVASRT_THREADS"):
            ModelOptions.from_environment({"CANVASRT_THREADS": value})
    front = FrontOptions(names=("a", "b"), keys=("k",))
    data = {each.name: getattr(front, each.name) for each in fields(front)}
    data |= {"names": ["a", "b"], "keys": ["k"]}
    assert FrontOptions.from_json(data) == front
