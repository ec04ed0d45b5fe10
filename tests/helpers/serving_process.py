"""`canvasrt serve` as a separate process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from canvasrt.containers.client.triton import Client

ANY_PORTS = ("--port", "0", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


JSON = {"Content-Type": "application/json"}
SHORT = {"max_tokens": 3, "max_denoising_steps": 2}


class Reply(NamedTuple):
    """An HTTP answer. A JSON body is parsed."""

    status: int
    body: Any
    headers: http.client.HTTPMessage


def call(
    host: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] = JSON,
    timeout: float = 120,
) -> Reply:
    """Send a POST with a body, given as bytes or as data for JSON. Without a body, send a GET."""
    connection = http.client.HTTPConnection(host, timeout=timeout)
    try:
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, sent, dict(headers))
        reply = connection.getresponse()
        data = reply.read()
        is_json = reply.headers.get_content_type() == "application/json"
        return Reply(reply.status, json.loads(data) if is_json else data, reply.headers)
    finally:
        connection.close()


def chat(
    host: str, content: str = "12+34=", key: str = "none", timeout: float = 120, **options: Any
) -> Reply:
    """Send a chat, which is short unless the options make it long; return the answer."""
    body = {"model": "canvasrt", "messages": [{"role": "user", "content": content}]}
    headers = {**JSON, "Authorization": f"Bearer {key}"}
    return call(host, "/v1/chat/completions", {**body, **SHORT, **options}, headers, timeout)


def ask(running: Serving, content: str = "12+34=", **options: Any) -> Reply:
    """Send a server a chat, which is short unless the options make it long; return the answer."""
    return chat(running.host, content, **options)


@dataclass
class Serving:
    """A ready `canvasrt serve`, and the addresses and ids that it printed."""

    process: subprocess.Popen[str]
    said: dict[str, Any]
    state: Path

    @property
    def host(self) -> str:
        """host:port of the OpenAI API."""
        return str(self.said["openai"]).removeprefix("http://").partition("/")[0]

    def client(self) -> Client:
        return Client(self.said["http"], timeout=60)

    def stop(self, number: int) -> str:
        """Send a signal and wait for the end; return what the process wrote to stderr."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=120)[1]

    def stale(self) -> list[str]:
        """Return processes and shared memory whose names contain the serving process's id."""
        mark = f"-{self.process.pid}-"
        shared = [each.name for each in Path("/dev/shm").glob(f"canvasrt-*{mark}*")]
        lines = command_lines().values()
        return shared + [line for line in lines if "canvasrt-" in line and mark in line]

    def model_process(self) -> int:
        """Return the id of the stream model's process."""
        wanted = ("/canvasrt_stream/1/model.py", f"-{self.process.pid}-")
        lines = command_lines().items()
        (found,) = (int(pid) for pid, line in lines if all(part in line for part in wanted))
        return found

    def scratch(self) -> list[str]:
        return [each.name for each in self.state.glob("tmp/*")]


@contextlib.contextmanager
def serving(bundle: Path, folder: Path, *options: str) -> Iterator[Serving]:
    """Run `canvasrt serve` with a separate state folder and a separate folder for temporary files."""
    process = started(bundle, folder, *options)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "}\n":
                break
        assert lines, process.communicate()[1]
        yield Serving(process, json.loads("".join(lines)), folder)
    except BaseException:
        process.terminate()
        print(process.communicate(timeout=60)[1][-4000:])  # pytest shows it with the failure
        raise
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(120)


def started(bundle: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start a server like `serving`, but do not wait until it is ready."""
    (folder / "tmp").mkdir(parents=True)
    env = {**os.environ, "XDG_STATE_HOME": str(folder), "TMPDIR": str(folder / "tmp")}
    command = [sys.executable, "-m", "canvasrt", "serve", str(bundle), "--json", *options]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def command_lines() -> dict[str, str]:
    """Return the command line of every process, by process id."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found[file.parent.name] = line
    return found
