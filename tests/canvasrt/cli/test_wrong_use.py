"""Every wrong use of every command: exit code 2, one `error:` line, one `hint:` line, and nothing
else."""

from __future__ import annotations

import shlex

import pytest

from canvasrt.cli.app import command_names, run

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
    "verify a --report r": "--report needs --reference",
    # making
    "export": "CHECKPOINT",
    "export demo -o out -p int4": "cannot export graphs in 'int4'",
    "export demo -o out --adapter a=x": "'x' is not a number",
    "export demo -o out --layers-per-segment 0": "--layers-per-segment",
    "quantize graphs -o out": "--precision",
    "quantize graphs -p int1 -o out": "int1",
    "build": "CHECKPOINT_OR_GRAPHS",
    "build demo": "--target",
    "build demo -t cpu": "--out",
    "build demo -t cpu -o out --max-batch 0": "--max-batch",
    "build demo -t cpu -o out --max-context many": "--max-context",
    "build demo -t gpu -o out": "unknown target 'gpu'",
    "build demo -t cpu,warp -o out": "unknown target 'warp'",
    "build demo -t rtx-5090 -p int1 -o out": "unknown precision 'int1'",
    "build demo -t cpu -o out --adapter a=x": "'x' is not a number",
    "package": "BUNDLE",
    "package e -o out --format zip": "unknown format 'zip'",
    "package e -o out --format oci": "--format oci needs --base",
    "package e -o out --format docker": "--format docker needs --base",
    "package e -o out --format oci --base b --wheels": "--wheels needs --format context",
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
    "generate b --prompt-ids 3 --raw": "--prompt-ids is the whole prompt",
    "generate b --prompt-ids 3 --system y": "--prompt-ids is the whole prompt",
    "generate b x --raw --system y": "--raw does not allow --system",
    "generate b --prompt-ids 3,x": "not a list of token ids: '3,x'",
    "generate b --prompt-ids 3,4,": "not a list of token ids: '3,4,'",
    "generate b --prompt-ids ,": "not a list of token ids: ','",
    "generate b --prompt-ids -3": "not a list of token ids: '-3'",
    "generate b --prompt-ids 99999999999": "not a list of token ids",
    "generate b x --n 0": "--n",
    "generate b x --n 2 --stream": "--n 2 does not allow --stream",
    "generate b x --n 2 --drafts": "--n 2 does not allow --stream",
    "generate b x --threads 0": "--threads",
    "generate b x --max-new-tokens 0": "--max-new-tokens is 0",
    "generate b x --max-new-tokens -1": "--max-new-tokens is -1",
    "generate b x --steps 0": "--steps is 0",
    "generate b x --seed -1": "--seed is -1",
    "generate b x --t-max nan": "--t-max is nan",
    "generate b x --t-min 3 --t-max 2": "t_max 2.0 is below t_min 3.0",
    "generate b x --entropy-bound 0": "--entropy-bound is 0.0",
    "generate b x --stability-threshold -1": "--stability-threshold is -1",
    "generate b x --confidence-threshold inf": "--confidence-threshold is inf",
    "bench": "BUNDLE",
    "bench b --against vllm": "unknown --against 'vllm'",
    "bench b --against transformers": "needs the checkpoint",
    "bench b --against transformers --checkpoint demo --early-stop": "does not allow --early-stop",
    "bench b --rounds 0": "--rounds",
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
    # serving
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
    "deploy p --env =1": "--env '=1' has no name",
}


@pytest.mark.parametrize("line", WRONG, ids=str)
def test_wrong_use_exits_with_2(
    line: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path_factory.mktemp("empty")
    monkeypatch.chdir(folder)
    assert run(shlex.split(line)) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert [each.partition(":")[0] for each in lines] == ["error", "hint"], captured.err
    assert WRONG[line] in lines[0]
    assert len(lines[1]) > len("hint: ")
    assert captured.out == ""
    assert list(folder.iterdir()) == []


def test_the_table_has_every_command() -> None:
    assert {line.split()[0] for line in WRONG} >= set(command_names())
