"""A server and a model that one caller asks a lot of."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from canvasrt.bundle import Bundle
from canvasrt.runtime.generator import Request
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.runtime.sampling_params import SamplingParams
from tests.helpers.serving_process import ANY_PORTS, Serving, serving

SHORT: dict[str, Any] = {"max_tokens": 3, "max_denoising_steps": 2}


@pytest.fixture(scope="module")
def running(packaged: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("one-caller")
    with serving(packaged.path, folder, *ANY_PORTS, "--max-connections", "40") as found:
        yield found


def address(running: Serving) -> str:
    return running.said["openai"].removeprefix("http://").partition("/")[0]


def ask(
    running: Serving, content: str = "12+34=", key: str = "none", **options: Any
) -> tuple[int, Any, float, Any]:
    """A chat's status, body, seconds, and headers."""
    body = {"model": "canvasrt", "messages": [{"role": "user", "content": content}]}
    connection = http.client.HTTPConnection(address(running), timeout=120)
    begin = time.monotonic()
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        text = json.dumps({**body, **SHORT, **options})
        connection.request("POST", "/v1/chat/completions", text, headers)
        reply = connection.getresponse()
        data = json.loads(reply.read())
        return reply.status, data, time.monotonic() - begin, reply.headers
    finally:
        connection.close()


@pytest.fixture(scope="module")
def model(engines: Bundle) -> Model:
    return open_model(engines.path, threads=1)


def request(model: Model, owner: str = "", **options: Any) -> Request:
    params = SamplingParams.from_defaults(
        model.sampler, model.config, **{"max_new_tokens": 4, "max_denoising_steps": 2, **options}
    )
    return Request([2, 5, 6], params, owner=owner)
