"""Clients that check answers during attacks, and helpers that list a service's processes and what it leaves."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.serving import eventually
from tests.helpers.serving_process import Reply, Serving, chat, command_lines

QUESTIONS = tuple(f"{a}+{b}=" for a in (12, 7, 40, 99) for b in (34, 5))
CLIENTS = 16
# The path of a call to Triton's HTTP port.
GENERATE = "/v2/models/canvasrt/generate"
PROMPT = {"prompt": "12+34=", "max_new_tokens": 4}
SECONDS = 60.0  # limit for recovering or ending


def known(host: str, question: str) -> Reply:
    """Send one chat, whose answer depends only on the question."""
    return chat(host, question, timeout=SECONDS, seed=5, max_tokens=40, max_denoising_steps=6)


def text_of(body: Any) -> str:
    """Return the answer in the body of a chat."""
    return str(body["choices"][0]["message"]["content"])


def known_answers(host: str) -> dict[str, str]:
    """Ask each question alone; return the answers."""
    return {each: text_of(known(host, each).body) for each in QUESTIONS}


class Clients:
    """Threads that ask continuously, and compare every answer with the answer to the same question asked alone."""

    def __init__(self, host: str, known: dict[str, str], count: int = CLIENTS) -> None:
        self.right = 0
        self.failed = Counter[str]()  # by status or by exception
        self.wrong: list[str] = []
        self._host, self._known = host, known
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._done.is_set():
            question = draw.choice(QUESTIONS)
            try:
                status, body, _ = known(self._host, question)
            except (OSError, http.client.HTTPException, ValueError) as error:
                with self._lock:
                    self.failed[type(error).__name__] += 1
                self._done.wait(0.05)
                continue
            with self._lock:
                if status != 200:
                    self.failed[str(status)] += 1
                elif text_of(body) == self._known[question]:
                    self.right += 1
                else:
                    self.wrong.append(f"{question}: {text_of(body)!r}")
            if status != 200:
                self._done.wait(0.05)

    def stop(self) -> None:
        """Stop asking, and wait for the last answers."""
        self._done.set()
        for thread in self._threads:
            thread.join(2 * SECONDS)
        self.wrong += [f"{thread.name} hangs" for thread in self._threads if thread.is_alive()]


def processes(running: Serving) -> dict[str, int]:
    """Return the process ids of a service, by the process's role."""
    own = running.process.pid
    found = {"supervisor": own, "triton": running.said["pid"]}
    marks = {
        "stream model": "/canvasrt_stream/1/model.py",
        "answer model": "/canvasrt/1/model.py",
        "guard": "canvasrt.containers.serve.guard",
        "front end": "canvasrt.containers.openai",
        "grammar sandbox": "canvasrt.containers.triton.sandbox_process",
    }
    for pid, line in command_lines().items():
        for name, mark in marks.items():
            if mark in line and (f"-{own}-" in line or own in ancestors(int(pid))):
                found[name] = int(pid)
    return found


def ancestors(pid: int) -> list[int]:
    """Return a process's parent, the parent's parent, and so on."""
    found = []
    while pid := parent_of(pid):
        found.append(pid)
    return found


def parent_of(pid: int) -> int:
    """Return a process's parent, or 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def left_behind(running: Serving) -> list[str]:
    """Return what is left of a service a minute after its end: processes, memory, files and ports."""
    ports = [running.said["http"], running.said["grpc"], running.host]
    found: list[str] = []

    def is_clean() -> bool:
        found[:] = running.stale() + running.scratch()
        found.extend(f"port {each}" for each in ports if is_open(each))
        return not found

    eventually(is_clean, SECONDS)
    return found


def is_open(address: str) -> bool:
    """Return whether something listens on host:port."""
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def over_http(
    running: Serving, path: str, body: Any, headers: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Call Triton's HTTP port; return the status and the text of the answer."""
    connection = http.client.HTTPConnection(running.said["http"], timeout=60)
    with contextlib.closing(connection):
        text = json.dumps(body) if isinstance(body, dict) else body
        connection.request("GET" if body is None else "POST", path, text, dict(headers or {}))
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
