"""`/openapi.json` and `/docs` are true: every route is there, and requests made from the document meet
no server error and no status, type or shape that it does not have."""

from __future__ import annotations

import http.client
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from canvasrt.bundle import Bundle
from canvasrt.containers.openai import app as application
from canvasrt.containers.openai.document import document
from canvasrt.containers.openai.options import FrontOptions, FrontSettings
from canvasrt.containers.openai.schema import OWN
from canvasrt.containers.openai.state import ServerState
from canvasrt.containers.package.package import repository_of
from canvasrt.containers.ports import Ports
from canvasrt.containers.serve.frontend import FrontEnd
from canvasrt.containers.serve.server import Server
from canvasrt.containers.triton.options import ModelOptions
from tests.helpers.serving import needs_triton

PAGES = {("get", "/"), ("get", "/docs")}


def test_every_route_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FastAPI] = []

    class Kept(FastAPI):
        def __init__(self, **options: object) -> None:
            super().__init__(**options)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(application, "FastAPI", Kept)
    settings = FrontSettings(0, "127.0.0.1:1", "http://127.0.0.1:1", FrontOptions(keys=("k",)))
    application.make_app(settings, ServerState())
    routes = {
        (method.lower(), route.path.replace(":path", ""))
        for route in made[0].routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    described = {(m, path) for path, each in document(True)["paths"].items() for m in each}
    assert routes - PAGES == described


def test_the_document_has_what_bodies_take() -> None:
    found = document(False)
    chat = found["components"]["schemas"]["ChatRequest"]["properties"]
    for parameter in OWN:
        assert parameter.name in chat
        shown = json.dumps(chat[parameter.name])
        assert parameter.about[1:] in shown
    assert "securitySchemes" not in found["components"]
    operation = document(True)["paths"]["/v1/chat/completions"]["post"]
    assert operation["security"] == [{"key": []}]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(found)))
    assert references <= set(found["components"]["schemas"])


@pytest.fixture(scope="module")
def bounded(packaged: Bundle) -> Iterator[FrontEnd]:
    """A server that allows little, so that no request takes long."""
    limits = ModelOptions(max_steps=4, max_passes=64)
    log = packaged.path.parent / "bounded.log"
    with (
        repository_of(packaged) as repository,
        Server(repository, ports=Ports(0, 0, 0), model=limits, log=log) as server,
        FrontEnd.over(server, FrontOptions(port=0, max_n=4)) as front,
    ):
        yield front


@needs_triton
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
    assert "Tested: 20" in done.stdout or re.search(r"\d+ passed", done.stdout), done.stdout[-3000:]


@needs_triton
def test_the_page_needs_nothing_else(bounded: FrontEnd) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", bounded.port, timeout=60)
    connection.request("GET", "/docs")
    reply = connection.getresponse()
    page = reply.read().decode()
    assert reply.status == 200
    for path in document(False)["paths"]:
        assert path in page
    assert "<script" not in page
    assert not re.search(r"(src|href)=['\"]?(https?:)?//", page)
    assert "default-src 'none'" in reply.getheader("content-security-policy", "")
