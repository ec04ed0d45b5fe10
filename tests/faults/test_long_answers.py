"""Slow answers and grammars, and their effect on other callers."""

from __future__ import annotations

import http.client
import json
import select
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.helpers.serving import ENDLESS, needs_triton
from tests.helpers.serving_process import Serving, ask

pytestmark = pytest.mark.acceptance
YES_OR_NO = {"type": "predicate", "instructions": "Is it?"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
LETTERS = {"type": "regex", "regex": "[a-z]{90}"}
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {**CHAT, **ENDLESS, "n": 4, "max_tokens": 4000}),
    "grammar": (
        "chat/completions",
        {**CHAT, **ENDLESS, "n": 4, "max_tokens": 100, "response_format": LETTERS},
    ),
    "infill": ("infill", {"text": "a {9} b", "max_denoising_steps": 10_000}),
    "decisions": (
        "decisions",
        {"input": "a", "samples": 64, "steps": 48, "questions": [YES_OR_NO] * 100},
    ),
}


@needs_triton
@pytest.mark.parametrize("kind", LONG)
def test_long_answers_do_not_starve_a_short_request(running: Serving, kind: str):
    path, body = LONG[kind]
    text = json.dumps({"model": "canvasrt", **body})
    hogs = [http.client.HTTPConnection(running.host) for _ in range(1 if "n" in body else 4)]
    for hog in hogs:
        hog.request("POST", f"/v1/{path}", text, {"Content-Type": "application/json"})
    try:
        assert select.select([hog.sock for hog in hogs], [], [], 1) == ([], [], [])
        assert ask(running)[0] == 200
        ended = select.select([hog.sock for hog in hogs], [], [], 0)[0]
        assert not ended, [hog.getresponse().read() for hog in hogs if hog.sock in ended]
    finally:
        for hog in hogs:
            hog.close()


@needs_triton
def test_a_grammar_that_takes_hours_holds_up_nobody(running: Serving):
    """The grammar is short, but compiling it takes hours and cannot be interrupted within its process."""
    patterns = [{"type": "string", "pattern": f"a{{{n}}}.*b"} for n in range(60)]
    schema = {"name": "a", "schema": {"allOf": patterns}}
    with ThreadPoolExecutor(1) as pool:
        form = {"type": "json_schema", "json_schema": schema}
        asked = pool.submit(ask, running, response_format=form)
        assert ask(running)[0] == 200
        while not asked.done():
            assert ask(running)[0] == 200
        status, body, _ = asked.result()
    assert (status, "1 s of CPU time" in body["error"]["message"]) == (400, True)
    assert ask(running, response_format=LETTERS, max_tokens=100)[0] == 200
