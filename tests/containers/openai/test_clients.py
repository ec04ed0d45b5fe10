"""NVIDIA's clients: tritonclient and AIPerf."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from canvasrt.containers.tensors import inputs_of
from tests.helpers.scripted import Script, Served
from tests.helpers.serving import needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient(acting_server: Served, acting: Script, protocol: str) -> None:
    """Calls the server over both protocols without code of canvasrt."""
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
    reason="aiperf is not found: install it into a separate environment, since it needs other "
    "versions than these tests, and name it in CANVASRT_AIPERF",
)
def test_aiperf_measures_the_server(acting_server: Served, tmp_path: Path) -> None:
    from bench.demo.tokenizer import build_tokenizer

    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    # AIPerf may use an older transformers, which knows only this class.
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
    # Every answer is "Hello there.", and AIPerf counts one token per character.
    assert report["output_sequence_length"]["avg"] == 12
    assert report["time_to_first_token"]["p50"] > 0
