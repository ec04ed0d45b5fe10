"""The OpenAI front end as a child process: started, told what goes on, restarted, drained and stopped."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from canvasrt.containers.openai.state import Phase, Settings
from canvasrt.containers.ports import API_PORT, listen
from canvasrt.containers.processes import die_with_parent
from canvasrt.containers.serve.server import Server
from canvasrt.errors import CanvasError

log = logging.getLogger(__name__)

RESTARTS = 5
_CALM = 60.0  # seconds after which earlier deaths are forgotten
_BACKOFF = (0.0, 0.5, 1.0, 2.0, 4.0)
_BACKLOG = 1024
_POLL = 0.05
_END = 5.0  # for a process that has nothing left to do


@dataclass(frozen=True)
class FrontOptions:
    """Where the front end listens, and what it says about the model. A port of 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = API_PORT
    health_port: int | None = None
    names: tuple[str, ...] = ("canvasrt",)
    keys: tuple[str, ...] = field(default=(), repr=False)
    tls: dict[str, str] | None = None
    log_level: str = "INFO"
    json_logs: bool = False
    about: dict[str, Any] = field(default_factory=dict)


class FrontEnd:
    """One front end over one Triton.

    The sockets belong to this process, so callers wait and are not refused while a dead front end is
    replaced. A context manager: inside it the front end serves, and it drains at the end.
    """

    def __init__(self, options: FrontOptions, grpc: str, metrics: str, log: Path | None) -> None:
        """`grpc` is Triton's host:port, `metrics` the URL of its metrics; `log` a file to append to,
        None for stderr. CanvasError for a port in use."""
        self.options = options
        self.log = log
        self._socket = listen(options.host, options.port, "--port", _BACKLOG)
        self._health: socket.socket | None = None
        try:
            if options.health_port is not None:
                self._health = listen(options.host, options.health_port, "--health-port", _BACKLOG)
        except CanvasError:
            self._socket.close()
            raise
        # Kept: a closed socket no longer says where it was.
        self.port: int = self._socket.getsockname()[1]
        self.health_port: int | None = self._health.getsockname()[1] if self._health else None
        self._settings = Settings(
            socket=self._socket.fileno(),
            health_socket=self._health.fileno() if self._health else None,
            grpc=grpc,
            metrics=metrics,
            names=options.names,
            keys=options.keys,
            about=options.about,
            tls=options.tls,
            log_level=options.log_level,
            json_logs=options.json_logs,
        )
        self._phase: tuple[Phase, str] = ("starting", "")
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths: list[float] = []

    @classmethod
    def over(cls, server: Server, options: FrontOptions) -> FrontEnd:
        """A front end over a server of this process."""
        where, ports = server.address, server.ports
        metrics = f"http://{where}:{ports.metrics}/metrics"
        return cls(options, f"{where}:{ports.grpc}", metrics, server.log)

    @property
    def url(self) -> str:
        """The base URL for OpenAI's clients."""
        return self._url(self.port, self.options.tls is not None)

    @property
    def health_url(self) -> str:
        """The base URL of the health routes: their own port where they have one, which has no TLS."""
        return self._url(self.health_port, False) if self.health_port else self.url

    def _url(self, port: int, secure: bool) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.options.host, self.options.host)
        where = f"[{host}]" if ":" in host else host
        return f"{'https' if secure else 'http'}://{where}:{port}/v1"

    @property
    def pid(self) -> int | None:
        """Its process id, None while there is none."""
        return self._process.pid if self._process else None

    def __enter__(self) -> FrontEnd:
        self.start()
        self.tell("serving")
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop(grace=_END if exc[0] is None else 0.0)

    def start(self) -> None:
        """Starts the process; it answers `/v1/health/live` as soon as it can."""
        sockets = [each.fileno() for each in (self._socket, self._health) if each]
        output: IO[bytes] | None = None
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            output = self.log.open("ab")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "canvasrt.containers.openai"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=output,
                pass_fds=sockets,
                start_new_session=True,  # Ctrl-C is for us
                preexec_fn=die_with_parent(),
            )
        finally:
            if output is not None:
                output.close()
        self._write(self._settings.to_line())
        self.tell(*self._phase)

    def tell(self, phase: Phase, detail: str = "") -> None:
        """Says what the server is doing, which decides whether requests are taken."""
        self._phase = (phase, detail)
        self._write(json.dumps({"phase": phase, "detail": detail}).encode() + b"\n")

    def describe(self, about: dict[str, Any]) -> None:
        """What `/v1/metadata` says from the next start on."""
        self._settings = replace(self._settings, about=about)

    def check_alive(self) -> None:
        """Replaces a process that has died; CanvasError when it dies again and again."""
        if self._process is None or self._process.poll() is None:
            return
        code = self._process.returncode
        now = time.monotonic()
        self._deaths = [each for each in self._deaths if now - each < _CALM] + [now]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if len(self._deaths) > RESTARTS:
            raise CanvasError(
                f"the OpenAI front end stopped with {how}, {len(self._deaths)} times in a minute",
                "its output says why" + (f"; the log is {self.log}" if self.log else ""),
            )
        pause = _BACKOFF[min(len(self._deaths), len(_BACKOFF)) - 1]
        log.warning("the OpenAI front end stopped with %s; starting it again", how)
        time.sleep(pause)
        self._close_input()
        self.start()

    def stop(self, grace: float, force: threading.Event | None = None) -> bool:
        """Takes no more requests, lets those in flight finish, and ends; False when some were cut off.

        Requests get `grace` seconds; setting `force` ends the wait at once.
        """
        process = self._process
        try:
            if process is None or process.poll() is not None:
                return True
            self.tell("stopping")
            # What is not accepted yet belongs to the process now: no new connections after it.
            self._close_sockets()
            deadline = time.monotonic() + grace
            while process.poll() is None:
                if time.monotonic() > deadline or (force is not None and force.is_set()):
                    return False
                time.sleep(_POLL)
            return True
        finally:
            self._close_sockets()
            self._close_input()
            self._kill()

    def _kill(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._process = None

    def _close_sockets(self) -> None:
        for each in (self._socket, self._health):
            if each is not None:
                each.close()

    def _close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # what was left to write goes nowhere
                self._process.stdin.close()

    def _write(self, line: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError, ValueError):  # it has died, which check_alive sees
            self._process.stdin.write(line)
            self._process.stdin.flush()
