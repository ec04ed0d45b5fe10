"""`POST /v1/infill`, and infill over Triton."""

from __future__ import annotations

import json

import httpx2
import pytest

from canvasrt.containers.client.triton import Client
from canvasrt.containers.serve.frontend import FrontEnd
from tests.helpers.serving import needs_triton

pytestmark = needs_triton
TEXT = "The {3} sat on {2}."


def test_gaps_are_filled_over_both(front: FrontEnd, http: Client) -> None:
    body = {"model": "canvasrt", "text": TEXT, "seed": 3, "max_denoising_steps": 4, "odd": 1}
    reply = httpx2.post(f"{front.url}/infill", json=body, timeout=60).json()
    first, second = reply["gaps"]
    assert reply["text"] == f"The {first} sat on {second}."
    assert reply["logprob"] < 0
    assert reply["canvasrt"] == {"seed": 3, "warnings": ["Unknown parameter: 'odd'."]}
    assert reply["usage"]["denoising_steps"] <= 4
    prompt = "Fill in the gaps: The ____ sat on ____."
    inputs = {"prompt": prompt, "infill": TEXT, "seed": 3, "max_denoising_steps": 4}
    answer = json.loads(http.infer(inputs).text)
    assert answer["text"] == reply["text"]


@pytest.mark.parametrize(("text", "message"), [("none", "has no gap"), ("{99}", "has 99 tokens")])
def test_wrong_texts_are_named(front: FrontEnd, text: str, message: str) -> None:
    body = {"model": "canvasrt", "text": text}
    reply = httpx2.post(f"{front.url}/infill", json=body, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "text"
    assert message in reply.json()["error"]["message"]
