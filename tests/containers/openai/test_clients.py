"""Clients other than OpenAI's: curl, tritonclient and AIPerf."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canvasrt.containers.tensors import inputs_of
from tests.helpers.scripted import Script, Served
from tests.helpers.serving import needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]


@pytest.fixture
def curl(acting_server: Served):
    """`curl(path, body)` posts JSON to the front end and returns its output."""

    def post(path: str, body: dict[str, Any], *options: str) -> str:
        command = ["curl", "-sS", "--fail-with-body", "--max-time", "60", "-N", *options]
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        done = subprocess.run(
            [*command, f"{acting_server.front.url}/{path}"],
            capture_output=True,
            text=True,
            check=True,
            env={"no_proxy": "*"},
        )
        return done.stdout

    return post


def test_a_chat(curl, acting: Script) -> None:
    body = {"model": "canvasrt", "messages": [{"role": "user", "content": "Hello"}]}
    body |= acting.choose("plain")
    answer = json.loads(curl("chat/completions", body))
    assert answer["choices"][0]["message"]["content"] == "Hello there."
    lines = curl("chat/completions", {**body, "stream": True}).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert said == "Hello there."


def test_a_response(curl, acting: Script) -> None:
    body = {"model": "canvasrt", "input": "Hello", **acting.choose("thinks")}
    response = json.loads(curl("responses", body))
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    events = curl("responses", {**body, "stream": True}).strip().split("\n\n")
    names = [event.split("\n")[0].removeprefix("event: ") for event in events]
    assert (names[0], names[-1]) == ("response.created", "response.completed")
    for name, event in zip(names, events, strict=True):
        assert json.loads(event.split("\n")[1].removeprefix("data: "))["type"] == name


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient(acting_server: Served, acting: Script, protocol: str) -> None:
    """NVIDIA's own client, over both protocols, without anything of ours."""
    module = importlib.import_module(f"tritonclient.{protocol}")
    port = getattr(acting_server.server.ports, protocol)
    values = {"prompt": np.array([b"Hello"], object)}
    values["entropy_bound"] = np.array([acting.choose("plain")["entropy_bound"]], np.float32)
    inputs = []
    for name, value in values.items():
        kind = "BYTES" if value.dtype == object else "FP32"
        inputs.append(module.InferInput(name, value.shape, kind))
        inputs[-1].set_data_from_numpy(value)
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        assert client.is_model_ready("canvasrt")
        names = {each.name for each in inputs_of("canvasrt")}
        metadata = client.get_model_metadata("canvasrt")
        told = metadata["inputs"] if protocol == "http" else metadata.inputs
        assert {each["name"] if protocol == "http" else each.name for each in told} == names
        if protocol == "http":
            assert {"name": "text", "datatype": "BYTES", "shape": [1]} in metadata["outputs"]
            policy = client.get_model_config("canvasrt_stream")["model_transaction_policy"]
            assert policy["decoupled"]
        answer = client.infer("canvasrt", inputs)
        assert answer.as_numpy("text")[0].decode() == "Hello there."
        assert answer.as_numpy("finish_reason")[0] == b"stop"


AIPERF = os.environ.get("CANVASRT_AIPERF") or shutil.which("aiperf")


@pytest.mark.skipif(
    AIPERF is None,
    reason="aiperf is not found: install it into an environment of its own, since it needs other "
    "versions than these tests, and name it in CANVASRT_AIPERF",
)
def test_aiperf_measures_the_server(acting_server: Served, tmp_path: Path) -> None:
    from bench.demo.tokenizer import build_tokenizer

    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    # AIPerf may come with an older transformers, which knows this class.
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    command = [str(AIPERF), "profile", "--model", "canvasrt", "--endpoint-type", "chat"]
    command += ["--url", acting_server.front.url.removesuffix("/v1"), "--streaming"]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--request-count", "10"]
    command += ["--synthetic-input-tokens-mean", "30", "--output-tokens-mean", "20"]
    command += ["--artifact-dir", str(tmp_path / "out"), "--ui", "simple"]
    environment = {**os.environ, "no_proxy": "*"}
    subprocess.run(command, check=True, capture_output=True, timeout=240, env=environment)
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 10
    assert report["error_summary"] == []
    # Every answer is "Hello there.", and AIPerf counts each of its characters as a token.
    assert report["output_sequence_length"]["avg"] == 12
    assert report["time_to_first_token"]["p50"] > 0
