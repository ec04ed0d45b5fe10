"""Requests with which clients of other servers probe a server, and errors in their form. No model runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.helpers.alone import lone_front


@pytest.fixture(scope="module")
def front() -> Iterator[TestClient]:
    with lone_front() as client:
        yield client


def test_probes_of_other_servers(front: TestClient) -> None:
    assert front.get("/version").json().keys() == {"version"}
    assert "canvasrt_openai_requests_total" in front.get("/metrics").text
    for path in ("/health", "/ping"):
        assert front.get(path).status_code == 503  # there is no model
    head = front.head("/v1/models")
    assert (head.status_code, front.head("/nothing").status_code) == (200, 404)


def test_errors_of_ollama_s_routes_are_strings(front: TestClient) -> None:
    for reply in (
        front.get("/api/nothing"),
        front.post("/api/show", json={"model": "other"}),
        front.post("/api/chat", json={"model": "other", "messages": []}),
    ):
        assert reply.status_code == 404
        assert isinstance(reply.json()["error"], str)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"type": "object"}, "guided_regex": "a"},
        {"guided_choice": ["a"], "response_format": {"type": "json_object"}},
        {"structured_outputs": {"structural_tag": "x"}},
        {"ignore_eos": True, "guided_regex": "a"},
    ],
    ids=str,
)
def test_formats_that_contradict_are_refused(front: TestClient, fields: dict[str, Any]) -> None:
    body = {"model": "canvasrt", "messages": [{"role": "user", "content": "a"}], **fields}
    assert front.post("/v1/chat/completions", json=body).status_code == 400
