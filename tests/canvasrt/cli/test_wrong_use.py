"""Every wrong use of every command: exit code 2, one `error:` line, one `hint:` line, and nothing
else."""

from __future__ import annotations

import ast
import contextlib
import io
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from canvasrt.cli.app import command_names, parsed_command, run
from canvasrt.errors import UsageError
from canvasrt.runtime.sampling import PARAMETERS

ROOT = Path(__file__).parents[3]

# A command line → what its error says. None of them reads a bundle or calls a server.
WRONG = {
    "nothing": "'nothing'",
    "--nothing": "--nothing",
    "demo x": "x",
    "doctor x": "x",
    "targets x": "x",
    "inspect": "BUNDLE",
    "verify a b": "b",
    "verify a --questions -1": "--questions",
    "verify a --report r": "--report needs --reference or --decisions",
    "verify a --fit": "--fit needs --decisions",
    "verify a --samples 1": "--samples needs --decisions",
    "verify a --steps 2": "--steps needs --decisions",
    "verify a --questions 5 --decisions f": "--questions needs --reference",
    "inspect a --batch 2": "--batch needs --kernels",
    "inspect a --gpu l4": "--gpu needs --kernels",
    "inspect a --page p": "--page needs --kernels",
    "export": "CHECKPOINT",
    "export demo -o out -p int4": "cannot export graphs in 'int4'",
    "export demo -o out --calibration missing.jsonl": "this checkpoint needs no calibration",
    "quantize graphs -p int4 -o out --calibration c": "--calibration has no effect: int4 needs",
    "export demo -o out --adapter a=x": "'x' is not a finite number",
    "export demo -o out --layers-per-segment 0": "--layers-per-segment",
    "quantize graphs -o out": "--precision",
    "quantize graphs -p int1 -o out": "unknown recipe 'int1'",
    "quantize graphs -p int1.yaml -o out": "there is no recipe file int1.yaml",
    "build demo -t cpu -p recipes/int1 -o out": "there is no recipe file recipes/int1",
    "build": "CHECKPOINT_OR_GRAPHS",
    "build demo": "--target",
    "build demo -t cpu": "--out",
    "build demo -t cpu -o out --max-batch 0": "--max-batch",
    "build demo -t cpu -o out --max-context many": "--max-context",
    "build demo -t gpu -o out": "unknown target 'gpu'",
    "build demo -t , -o out": "no target was named",
    "build demo -t rtx-3090 -p nvfp4 -o out": "rtx-3090 does not support precision 'nvfp4'",
    "build demo -t cpu,rtx-3090 -p fp8 -o out": "rtx-3090 does not support precision 'fp8'",
    "build demo -t cpu,warp -o out": "unknown target 'warp'",
    "build demo -t cpu -o out --adapter a=nan": "'nan' is not a finite number",
    "build demo -t cpu -o out --max-context 5": "--max-context 5 leaves no room",
    "build demo -t cpu -o out --max-context 99999999": "--max-context 99999999 is more than",
    "build demo -t rtx-5090 -p int1 -o out": "unknown precision 'int1'",
    "build demo -t cpu -o out --adapter a=x": "'x' is not a finite number",
    "package": "BUNDLE",
    "package e -o out --format zip": "unknown format 'zip'",
    "package e -o out --format oci": "--format oci needs --base",
    "package e -o out --format docker": "--format docker needs --base",
    "package e -o out --format oci --base b --wheels": "--wheels needs --format context",
    "package e -o out --sign key.pem": "--sign needs --format oci or docker",
    "verify a --key key.pub": "--key needs an image",
    "package e -o out --base .": "--base . is a file or folder",
    "package e -o out --engines move": "--engines is 'move'",
    "package e -o out --tag Big:1": "'Big:1' is not a name for an image",
    "package e -o out --python three": "--python is 'three'",
    "package e -o out --max-batch 0": "--max-batch",
    # generating here
    "generate": "BUNDLE",
    "generate b": "there is no prompt",
    "generate b ''": "the prompt is empty",
    "generate b ' '": "the prompt is empty",
    "generate b x --prompt-ids 3": "--prompt-ids is the whole prompt",
    "generate b --prompt-ids 3 --system y": "--prompt-ids is the whole prompt",
    "generate b x --raw --system y": "--raw does not allow --system",
    "generate b --prompt-ids 3,x": "not a list of token ids: '3,x'",
    "generate b --prompt-ids 3,4,": "not a list of token ids: '3,4,'",
    "generate b --prompt-ids -3": "not a list of token ids: '-3'",
    "generate b --prompt-ids 99999999999": "not a list of token ids",
    "generate b x --n 0": "--n",
    "generate b x --n 2 --stream": "--n 2 does not allow --stream",
    "generate b x --n 2 --drafts": "--n 2 does not allow --drafts",
    "generate b x --threads 0": "--threads",
    "generate b x --max-new-tokens 0": "--max-new-tokens is 0",
    "generate b x --max-new-tokens -1": "--max-new-tokens is -1",
    "generate b x --steps 0": "--steps is 0",
    "generate b x --seed -1": "--seed is -1",
    "generate b x --t-max nan": "--t-max is nan",
    "generate b x --t-min 3 --t-max 2": "--t-max 2.0 is below --t-min 3.0",
    "generate b x --top-logprobs 2": "--top-logprobs is 2 without --logprobs",
    "infer x --settle-steps 2 --redo-below -1": "--settle-steps is 2 and --redo-below is -1.0",
    "chat --settle-steps 2 --all-steps": "--settle-steps is 2, but early stopping is off",
    "generate b x --t-min 0 --t-max 1e-9 --steps 2": "--t-max 1e-09 leads to a temperature",
    "generate b x --entropy-bound 0": "--entropy-bound is 0.0",
    "generate b x --stability-threshold -1": "--stability-threshold is -1",
    "generate b x --confidence-threshold inf": "--confidence-threshold is inf",
    "bench": "BUNDLE",
    "bench b --against vllm": "unknown --against 'vllm'",
    "bench b --against transformers": "needs the checkpoint",
    "bench b --against transformers --checkpoint demo --early-stop": "does not allow --early-stop",
    "bench b --rounds 0": "--rounds",
    "bench b --concurrency 2": "--concurrency is for measuring a server",
    "bench http://h --batch 2": "--batch is for measuring a bundle",
    "bench http://h --prompts none": "--prompts none is neither a file nor a set",
    "bench http://h --all-steps": "--early-stop is for measuring a bundle",
    "bench http://h:x": "http://h:x is not an address of a server",
    "bench http://h --model m --against http://h": "--against is http://h itself",
    "bench http://h --against vllm": "vllm is not an address of a server",
    "bench http://h --rate 0": "--rate",
    # calling a server
    "infer": "there is no prompt",
    "infer ''": "the prompt is empty",
    "infer x --prompt-ids 3": "--prompt-ids is the whole prompt",
    "infer x --raw --system y": "--raw does not allow --system",
    "infer --prompt-ids 3,4,": "not a list of token ids: '3,4,'",
    "infer --prompt-ids 99999999999": "not a list of token ids",
    "infer x --seed -1": "--seed is -1",
    "infer x --steps 0": "--steps is 0",
    "infer x --protocol smtp": "unknown protocol 'smtp'",
    "infer x --stream": "does not stream over --protocol http",
    "infer x --drafts": "does not stream over --protocol http",
    "infer x --url https://a:1": "unsupported scheme https",
    "infer x --url a:port": "--url a:port is not an address",
    "infer x --url a:99999": "--url a:99999 is not an address",
    "infer x --protocol grpc --url http://": "has no host",
    "infer x --protocol openai --url ftp://a": "unsupported scheme ftp",
    "infer x --protocol openai --url a:port": "--url a:port is not an address",
    "infer x --timeout -5": "--timeout",
    "chat --seed -1": "--seed is -1",
    "chat --logprobs": "--logprobs",
    "chat --score-blocks": "--score-blocks",
    "chat --url a:port": "--url a:port is not an address",
    "ask": "BUNDLE_OR_URL",
    "generate b --infill a{1}b --stream": "--infill fills one text",
    "generate b --infill a{1}b --canvas {}": "--infill has a canvas of its own",
    "generate b --infill gapless": "--infill has no gap",
    "generate b x --canvas nope": "--canvas is not JSON",
    "generate b x --canvas '{\"nope\": 1}'": "--canvas",
    "ask b q.yaml ' '": "INPUT is empty",
    "ask b q.yaml x --samples 0": "--samples",
    "ask b q.yaml x --steps 0": "--steps",
    "ask b q.yaml x --layout nope": "--layout is 'nope'",
    "ask http://h q.yaml x --threads 2": "--threads does not support a server",
    "ask http://h q.yaml x --device cpu": "--device does not support a server",
    # serving
    "serve b --ready-timeout -5": "--ready-timeout",
    "serve --dry-run": "there is nothing to serve",
    "serve b --port 70000": "--port",
    "serve b --health-port -1": "--health-port",
    "serve b --http-port 70000": "--http-port",
    "serve b --grpc-port x": "--grpc-port",
    "serve b --metrics-port 70000": "--metrics-port",
    "serve b --max-model-len 0": "--max-model-len",
    "serve b --exit-timeout -1": "--exit-timeout",
    "serve b --log-level loud": "--log-level is 'loud': not one of TRACE",
    "serve b --ssl-mode on": "--ssl-mode is 'on': not one of disabled",
    "serve b --served-model-name ,": "--served-model-name is ',': contains no name",
    "serve b --json-logs --log file": "--json-logs writes to stderr",
    "serve demo --port 9000 --grpc-port 9000": "--port and --grpc-port are both 9000",
    "serve demo --metrics-port 8000": "--port and --metrics-port are both 8000",
    "serve demo --triton-behind-proxy": "--triton-behind-proxy has no effect: Triton listens on",
    "serve demo --ssl-key k": "--ssl-key has no effect without --ssl-mode",
    "serve demo --ssl-mode tls --ssl-cert c": "--ssl-mode tls needs --ssl-key",
    "serve demo --ssl-mode tls --ssl-cert c --ssl-key k --ssl-ca a": "--ssl-ca has no effect",
    "serve demo --ssl-mode mtls --ssl-cert c --ssl-key k": "--ssl-mode mtls needs --ssl-ca",
    "serve demo --profile p": "--profile has no effect: demo is a checkpoint",
    "list-model-profiles": "there is nothing to serve",
    "download-to-cache": "there is nothing to serve",
    "download-to-cache b --all --profile p": "--all does not allow --profile",
    "create-model-store": "--model-store",
    "create-model-store -m out": "there is nothing to serve",
    "deploy": "PACKAGE",
    "deploy p --engine lxc": "unknown engine 'lxc'",
    "deploy p --engine lxc --print": "unknown engine 'lxc'",
    "deploy p --port 0": "--port",
    "deploy p --grpc-port 70000": "--grpc-port",
    "deploy p --http-port 70000": "--http-port",
    "deploy p --name 'a b'": "--name is 'a b'",
    "deploy p --gpus some": "--gpus is 'some'",
    "deploy p --shm-size much": "--shm-size is 'much'",
    "deploy p --memory much": "--memory is 'much'",
    "deploy p --cpus -1": "--cpus is -1",
    "deploy p --timeout -1": "--timeout",
    "deploy p --env =1": "--env '=1' has no name",
}


# The same with the variables or the files that it takes.
VARIABLES = {
    "serve b --dry-run": {
        "NIM_PASSTHROUGH_ARGS": ("--nothing", "NIM_PASSTHROUGH_ARGS is '--nothing'"),
        "NIM_NOTHING": ("1", "NIM_NOTHING is not supported"),
        "NIM_SERVER_PORT": ("x", "NIM_SERVER_PORT is 'x'"),
        "CANVASRT_API_KEYS": (",", "CANVASRT_API_KEYS is set but contains no key"),
    },
    "serve demo --triton-host 0.0.0.0": {
        "CANVASRT_API_KEYS": ("key", "--triton-host is 0.0.0.0"),
    },
}
RECIPE = """\
schema: 1
name: mine
description: For one GPU.
targets: [rtx-5090]
quantize:
  - {weights: ["layers.*.mlp.gate_up"], format: int4}
"""
FILES = {
    "build demo -t rtx-4090 -p mine.yaml -o out": (
        *("mine.yaml", RECIPE),
        "the recipe 'mine' is not for rtx-4090",
    ),
    "build demo -t cpu -p int4 --calibration mine.jsonl -o out": (
        *("mine.jsonl", '{"prompt": "1+2="}'),
        "--calibration has no effect: int4 needs no calibration",
    ),
    "verify image --reference demo": (
        *("image/index.json", "{}"),
        "--reference does not support images",
    ),
}
# What only Python code, or a bundle, can do wrong: where it is raised and words of its message →
# the test that has these words.
ELSEWHERE = {
    ("containers/package/package.py", "there is no bundle to package"): (
        "tests/containers/package/test_package.py"
    ),
    ("containers/client/triton.py", "Triton does not stream over"): (
        "tests/containers/client/test_client.py"
    ),
    ("canvasrt/kernels/rates.py", "unknown GPU"): "tests/canvasrt/kernels/test_predict.py",
    ("canvasrt/kernels/predict.py", "no profile of"): "tests/canvasrt/kernels/test_predict.py",
    ("runtime/open.py", "unknown device"): "tests/runtime/backends/test_onnxruntime_cuda.py",
    ("runtime/open.py", "but the engines support at most"): (
        "tests/containers/serve/test_supervised.py"
    ),
    ("containers/ports.py", "give a port from 1 to 65535"): (
        "tests/containers/serve/test_serve.py"
    ),
    ("build/plan.py", "holds graphs, but --adapter"): "tests/build/test_checks.py",
    ("build/plan.py", "holds graphs of"): "tests/build/test_checks.py",
    ("containers/serve/settings.py", "are both set"): "tests/containers/serve/test_settings.py",
    # Typer refuses these values itself.
    ("build/plan.py", "--max-batch {options.max_batch} is less than 1"): (
        "tests/build/test_checks.py"
    ),
    (
        "build/plan.py",
        "--layers-per-segment {requested} is less than 1",
    ): "tests/build/test_checks.py",
}


def refused(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command line; assert that it is refused, and how."""
    before = sorted(Path().rglob("*"))
    assert run(shlex.split(line)) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert [each.partition(":")[0] for each in lines] == ["error", "hint"], captured.err
    assert says in lines[0]
    assert len(lines[1]) > len("hint: ")
    assert captured.out == ""
    assert sorted(Path().rglob("*")) == before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", WRONG, ids=str)
def test_wrong_use_exits_with_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(line, WRONG[line], capsys)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "name"), [(line, name) for line, names in VARIABLES.items() for name in names]
)
def test_a_wrong_variable_exits_with_2(
    line: str, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    value, says = VARIABLES[line][name]
    monkeypatch.setenv(name, value)
    refused(line, says, capsys)


@pytest.mark.parametrize("line", FILES, ids=str)
def test_a_file_used_wrongly_exits_with_2(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, text, says = FILES[line]
    write(folder / name, text)
    refused(line, says, capsys)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")


def test_the_table_has_every_command() -> None:
    assert {line.split()[0] for line in WRONG} >= set(command_names())


def raised() -> dict[tuple[str, int], str]:
    """Return the source of every `UsageError(…)` by file and first line."""
    found = {}
    for top in ("canvasrt", "export", "build", "runtime", "containers"):
        for file in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "UsageError":
                    place = (str(file.relative_to(ROOT)), node.lineno)
                    found[place] = " ".join(ast.unparse(node).split())
    return found


def test_every_usage_error_has_a_test(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one needs a row above."""
    reached: set[tuple[str, str, int]] = set()
    before = UsageError.__init__

    def remember(self: UsageError, *args: Any, **names: Any) -> None:
        frame = sys._getframe(1)
        reached.add((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
        before(self, *args, **names)

    monkeypatch.setattr(UsageError, "__init__", remember)
    for name, text, _ in FILES.values():
        write(folder / name, text)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        for line in (*WRONG, *FILES):
            run(shlex.split(line))
        for line, variables in VARIABLES.items():
            for name, (value, _) in variables.items():
                monkeypatch.setenv(name, value)
                run(shlex.split(line))
                monkeypatch.delenv(name)
    lines = {
        (str(Path(file).relative_to(ROOT)), line)
        for file, _, line in reached
        if file.startswith(str(ROOT))
    }
    sources = raised()
    assert len(sources) > 50
    tested_elsewhere = set()
    for (file, words), test in ELSEWHERE.items():
        said = words.rpartition("} ")[2]
        assert said in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not say {said!r}"
        places = [each for each, text in sources.items() if each[0] == file and words in text]
        assert len(places) == 1, f"{len(places)} errors of {file} say {words!r}"
        tested_elsewhere |= set(places)
    missing = {
        place: source
        for place, source in sources.items()
        if place not in lines and place not in tested_elsewhere
    }
    assert missing == {}


def numbers() -> list[tuple[str, str, list[str]]]:
    """Return every option with a number, by command, and values that it cannot take."""
    found = []
    for command in command_names():
        for each in parsed_command(command).params:
            if each.type_descriptor.annotation not in (int, float):
                continue
            ends = [each.min - 1] if each.min is not None else []
            ends += [each.max + 1] if each.max is not None else []
            option = next(name for name in each.opts if name.startswith("--"))
            found.append((command, option, ["x", *map(str, ends)]))
    return found


def test_every_number_is_checked() -> None:
    found = numbers()
    assert len(found) > 50
    sampling = {each.option.partition("/")[0] for each in PARAMETERS}
    for command, option, values in found:
        rows = [line for line in WRONG if line.startswith(f"{command} ") and option in line]
        assert len(values) > 1 or option in sampling or rows, f"{command} {option} has no limits"
        for value in values:
            with pytest.raises(Exception) as refused:  # noqa: PT011 - Typer has no public type
                parsed_command(command).make_context(command, [option, value])
            error: Any = refused.value
            assert error.exit_code == 2, (command, option, value)
            assert option in error.format_message(), (command, option, value)
