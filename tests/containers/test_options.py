"""A new server option, or a new request field, touches few places."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest

from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.errors import CanvasError

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
_NEW_FIELD = """
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
_NEW_OPTION = """
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
# An option that `canvasrt deploy` also takes and the compose file passes on.
_NEW_CONTAINER_OPTION = """
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


@pytest.mark.parametrize(
    "code", [_NEW_FIELD, _NEW_OPTION, _NEW_CONTAINER_OPTION], ids=["field", "option", "container"]
)
def test_a_new_one_arrives_without_a_change_elsewhere(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _REPLACED + code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


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
