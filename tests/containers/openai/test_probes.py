"""Requests that clients of other servers send to identify a server, and errors in those servers' form. No model
runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from canvasrt import __version__
from tests.helpers.alone import lone_front


@pytest.fixture(scope="module")
def front() -> Iterator[TestClient]:
    with lone_front() as client:
        yield client


def test_probes_of_other_servers(front: TestClient) -> None:
    assert front.get("/version").json().keys() == {"version"}
    assert front.get("/v1/version").json()["release"] == __version__
    metadata = front.get("/v1/metadata").json()
    assert metadata["modelInfo"][0]["shortName"] == "canvasrt"
    assert metadata["licenseInfo"]["name"] == "Apache-2.0"
    assert front.get("/v1/license").json()["name"] == "Apache-2.0"
    assert front.get("/v1/health/live").json()["status"] == "live"
    assert "canvasrt_openai_requests_total" in front.get("/metrics").text
    for path in ("/health", "/ping"):
        assert front.get(path).status_code == 503  # no model
    head = front.head("/v1/models")
    assert (head.status_code, front.head("/nothing").status_code) == (200, 404)


def test_an_error_of_ollama_s_routes_is_a_string(front: TestClient) -> None:
    reply = front.get("/api/nothing")
    assert reply.status_code == 404
    assert isinstance(reply.json()["error"], str)
