"""Servers that end by themselves: what their callers and their health routes see of it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

from tests.helpers.serving_process import Serving

SHORT = {"max_tokens": 3, "max_denoising_steps": 2}


def ask(running: Serving, **options: Any) -> tuple[int, Any]:
    """One chat's status and body."""
    body = {"model": "canvasrt", "messages": [{"role": "user", "content": "12+34="}]}
    return call(running, "POST", "/v1/chat/completions", {**body, **SHORT, **options})


def call(running: Serving, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    host = running.said["openai"].removeprefix("http://").partition("/")[0]
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


class Watch:
    """Asks for both health routes until the server is gone; the statuses seen, in order."""

    def __init__(self, running: Serving) -> None:
        self.seen: dict[str, list[int]] = {"live": [], "ready": []}
        self._running = running
        self._threads = [threading.Thread(target=self._run, args=(name,)) for name in self.seen]
        for thread in self._threads:
            thread.start()

    def _run(self, name: str) -> None:
        while True:
            try:
                self.seen[name].append(call(self._running, "GET", f"/v1/health/{name}")[0])
            except (OSError, http.client.HTTPException):
                return
            time.sleep(0.02)

    def join(self) -> dict[str, set[int]]:
        for thread in self._threads:
            thread.join(60)
        return {name: set(seen) for name, seen in self.seen.items()}


def end(running: Serving) -> tuple[int, str]:
    """The exit code, and what was written to stderr, of a server that ends by itself."""
    errors = running.process.communicate(timeout=60)[1]
    assert not running.stale()
    assert not running.scratch()
    return running.process.returncode, errors
