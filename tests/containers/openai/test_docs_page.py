"""`/openapi.json` and `/docs` are complete and correct: requests generated from the document get no server error, and
no status, type or shape that is not documented."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers.openai.app import ENDPOINTS
from canvasrt.containers.openai.body import OWN
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.package.package import repository_of
from canvasrt.containers.ports import Ports
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.settings import Settings
from canvasrt.containers.triton.options import ModelOptions
from tests.helpers.alone import lone_front
from tests.helpers.serving import needs_triton

GET = [
    "/v1/models",
    "/v1/models/{name}",
    "/v1/health/live",
    "/v1/health/ready",
    "/v1/version",
    "/v1/metadata",
    "/v1/manifest",
    "/v1/license",
    "/v1/metrics",
    "/api/tags",
    "/api/ps",
    "/api/version",
]
ROUTES = {"get": GET, "post": [*(each.path for each in ENDPOINTS), "/api/show"]}


def test_every_operation_is_described_with_its_body() -> None:
    found = lone_front().get("/openapi.json").json()
    described = {(method, path) for path, each in found["paths"].items() for method in each}
    assert described == {(method, path) for method in ROUTES for path in ROUTES[method]}
    schemas = found["components"]["schemas"]
    chat = schemas["ChatRequest"]["properties"]
    for parameter in OWN:
        assert parameter.about[1:] in json.dumps(chat[parameter.name])
    assert chat["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 128}
    for name in ("DecisionRequest", "SystemOneRequest"):
        of = {each: schemas[name]["properties"][each]["anyOf"][0] for each in ("samples", "steps")}
        assert [(each["minimum"], each["maximum"]) for each in of.values()] == [(1, 64), (1, 48)]
    for name in ("ChatRequest", "ResponsesRequest", "MessagesRequest", "SystemOneRequest"):
        sizes = schemas[name]["properties"]["image_tokens"]["anyOf"][0]["enum"]
        assert sizes == [70, 140, 280], name
    assert not re.search(r'"(ge|gt|le|lt)":', json.dumps(found)), "not keywords of JSON Schema"
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(found)))
    assert references <= set(schemas)
    operation = found["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "429", "503"} <= set(operation["responses"])
    assert "422" not in operation["responses"]
    assert set(operation["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }


def test_keys_are_described_where_there_are_some() -> None:
    assert "securitySchemes" not in lone_front().get("/openapi.json").json()["components"]
    found = lone_front(keys=("k",)).get("/openapi.json").json()
    assert found["paths"]["/v1/chat/completions"]["post"]["security"] == [{"key": []}]
    assert "security" not in found["paths"]["/v1/version"]["get"]


def test_the_page_needs_nothing_else() -> None:
    reply = lone_front().get("/docs")
    for path in (*ROUTES["get"], *ROUTES["post"]):
        assert path in reply.text
    assert "<script" not in reply.text
    assert not re.search(r"(src|href)=['\"]?(https?:)?//", reply.text)
    assert "default-src 'none'" in reply.headers["content-security-policy"]


@pytest.fixture(scope="module")
def bounded(packaged: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    """A server with low limits, so that no request takes long."""
    limits = ModelOptions(max_steps=4, max_passes=64)
    log = str(tmp_path_factory.mktemp("bounded") / "triton.log")
    settings = Settings(ports=Ports(0, 0, 0), model=limits, log=log)
    with (
        repository_of(packaged) as repository,
        Server(repository, settings) as server,
        FrontEnd.over(server, FrontOptions(port=0, max_n=4)) as front,
    ):
        yield front


@needs_triton
@pytest.mark.acceptance
@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"
)
def test_requests_made_from_the_document_meet_nothing_else(
    bounded: FrontEnd, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{bounded.port}/openapi.json"
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", url]
    command += ["--checks", f"{checks},response_schema_conformance", "--seed", "1"]
    command += ["--max-examples", "20", "--phases", "coverage,fuzzing", "--no-color"]
    command += ["--request-timeout", "60", "--generation-deterministic", "--mode", "all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "Tested: 22" in done.stdout or re.search(r"\d+ passed", done.stdout), done.stdout[-3000:]
