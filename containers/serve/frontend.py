"""Runs the OpenAI front end as a child process: starts, notifies, restarts, drains and stops it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from canvasrt.containers.heartbeat import acknowledged, silence
from canvasrt.containers.openai.options import FrontOptions, FrontSettings, ServerPhase
from canvasrt.containers.ports import BACKLOG, bind, listen, url_host
from canvasrt.containers.processes import CALLER_SECRET, child_environment, die_with_parent
from canvasrt.containers.serve.server import Server
from canvasrt.errors import CanvasError

log = logging.getLogger(__name__)

RESTARTS = 5
_CALM = 60.0  # seconds after which a crash no longer counts
_BACKOFF = (0.0, 0.5, 1.0, 2.0, 4.0)
_POLL = 0.05
_SILENCE = 10.0  # seconds without a heartbeat of the event loop after which the process is replaced
_FIRST_BEAT = 60.0  # seconds without a heartbeat after which a starting process is replaced
_END = 5.0  # seconds that an idle process has to exit
_BEFORE_REQUESTS = ("starting", "building", "loading")  # phases in which no request is accepted


class FrontEnd:
    """The front end of one Triton server.

    This process owns the listening sockets. While a dead front end is replaced, callers wait instead of being refused.
    As a context manager, it starts the front end, and stops it at the end.
    """

    def __init__(
        self,
        options: FrontOptions,
        grpc: str,
        metrics: str,
        log: Path | None,
        request_timeout: int | None = None,
        triton: Server | None = None,
    ) -> None:
        """Open the sockets. Raises CanvasError for a port in use.

        grpc: the address of Triton's gRPC server. metrics: the URL of Triton's metrics. log: a file to append to; None
        for stderr. request_timeout: seconds per request. triton: the server whose HTTP and gRPC ports the front end
        guards; None if it guards no ports.
        """
        self.options = options
        self.log = log
        with contextlib.ExitStack() as stack:
            api = stack.enter_context(listen(options.host, options.port, "--port", BACKLOG))
            guarded = reserved = health = None
            if triton is not None:
                guarded = stack.enter_context(
                    listen(triton.host, triton.ports.http, "--http-port", BACKLOG)
                )
                # This socket only reserves the port. The child listens on the port with its own socket.
                reserved = stack.enter_context(bind(triton.host, triton.ports.grpc, "--grpc-port"))
            if options.health_port is not None:
                health = stack.enter_context(
                    listen(options.host, options.health_port, "--health-port", BACKLOG)
                )
            self._sockets = stack.pop_all()
        self._heartbeat = os.memfd_create("canvasrt-front-end")
        self._inherited = [each.fileno() for each in (api, guarded, reserved, health) if each]
        self._inherited.append(self._heartbeat)
        # Stored, because a closed socket no longer knows its port.
        self.port: int = api.getsockname()[1]
        self.health_port: int | None = health.getsockname()[1] if health else None
        self._settings = FrontSettings(
            socket=api.fileno(),
            health_socket=health.fileno() if health else None,
            grpc=grpc,
            metrics=metrics,
            options=options,
            heartbeat=self._heartbeat,
            request_timeout=request_timeout,
            caller_secret=CALLER_SECRET,
            triton_socket=guarded.fileno() if guarded else None,
            triton_host=triton.host if triton else "",
            triton_path=str(triton.sockets / "http") if triton and triton.sockets else "",
            grpc_address=_address(reserved) if reserved else "",
        )
        self._phase: tuple[ServerPhase, str] = ("starting", "")
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths: list[float] = []
        self._reports = 0  # number of reports sent to the running process

    @classmethod
    def over(cls, server: Server, options: FrontOptions) -> FrontEnd:
        """Return the front end of a server that this process runs."""
        guarded, host = None, url_host(server.host)
        if server.sockets is not None:
            guarded, host = server, f"unix:{server.sockets / 'grpc'}"
        # Triton appends the port to a socket's path, too.
        grpc = f"{host}:{server.ports.grpc}"
        return cls(options, grpc, server.metrics_url, server.log, server.request_timeout, guarded)

    @property
    def url(self) -> str:
        """The base URL for OpenAI's clients."""
        return self._url(self.port, self.options.tls is not None)

    @property
    def health_url(self) -> str:
        """The base URL of the health routes. Their separate port, if any, has no TLS."""
        return self._url(self.health_port, False) if self.health_port else self.url

    def _url(self, port: int, secure: bool) -> str:
        return f"{'https' if secure else 'http'}://{url_host(self.options.host)}:{port}/v1"

    @property
    def pid(self) -> int | None:
        """The id of the process; None while no process is running."""
        return self._process.pid if self._process else None

    def __enter__(self) -> FrontEnd:
        self.start()
        self.notify("serving")
        self.wait_acknowledged()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop(grace=_END if exc[0] is None else 0.0)

    def start(self) -> None:
        """Start the process, which will answer `/v1/health/live`."""
        os.ftruncate(self._heartbeat, 0)  # erases the old process's heartbeat
        self._started = time.monotonic()
        output: IO[bytes] | None = None
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            output = self.log.open("ab")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "canvasrt.containers.openai"],
                env=child_environment(),  # API keys are passed over standard input
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=output,
                pass_fds=self._inherited,
                start_new_session=True,  # a separate session, so that Ctrl-C only reaches this process
                preexec_fn=die_with_parent(),
            )
        finally:
            if output is not None:
                output.close()
        self._write(self._settings.to_line())
        self._reports = 0
        self.notify(*self._phase)

    def notify(self, phase: ServerPhase, detail: str = "") -> None:
        """Report the server's phase, which decides whether requests are accepted."""
        self._phase = (phase, detail)
        self._reports += 1
        self._write(json.dumps({"phase": phase, "detail": detail}).encode() + b"\n")

    def wait_acknowledged(self) -> None:
        """Wait until the process has applied the last phase. Returns early if the process is dead or hangs, which
        `check_alive` handles."""
        deadline = time.monotonic() + _SILENCE
        while self._process is not None and self._process.poll() is None:
            if acknowledged(self._heartbeat) >= self._reports or time.monotonic() > deadline:
                return
            time.sleep(_POLL / 10)

    def check_alive(self) -> None:
        """Restart the process if it is dead or hangs. Raises CanvasError if that happens too often."""
        if self._process is None:
            return
        hangs = self._process.poll() is None and self._is_silent()
        if hangs:
            self._process.kill()
            self._process.wait()
        code = self._process.returncode
        if code is None:
            return
        now = time.monotonic()
        self._deaths = [each for each in self._deaths if now - each < _CALM] + [now]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        how = f"no progress for {_SILENCE:g} s" if hangs else how
        if len(self._deaths) > RESTARTS:
            raise CanvasError(
                f"the OpenAI front end stopped with {how}, {len(self._deaths)} times in a minute",
                "see its output" + (f"; the log is {self.log}" if self.log else ""),
            )
        pause = _BACKOFF[min(len(self._deaths), len(_BACKOFF)) - 1]
        log.warning("the OpenAI front end stopped with %s; restarting it", how)
        time.sleep(pause)
        self._close_input()
        self.start()

    def _is_silent(self) -> bool:
        silent = silence(self._heartbeat)
        if silent is None:
            return time.monotonic() - self._started > _FIRST_BEAT
        return silent > _SILENCE

    def stop(self, grace: float, force: threading.Event | None = None) -> bool:
        """Refuse new requests, let those in flight finish, and stop the process; return whether all finished.

        Requests get `grace` seconds. Setting `force` ends the wait immediately.
        """
        try:
            return self.drain(grace, force)
        finally:
            self._sockets.close()
            self._close_input()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None
            if self._heartbeat >= 0:
                os.close(self._heartbeat)
                self._heartbeat = -1

    def drain(self, grace: float, force: threading.Event | None = None) -> bool:
        """Like `stop`, but keep the process running if requests are still in flight."""
        process = self._process
        if process is None or process.poll() is not None or self._phase[0] in _BEFORE_REQUESTS:
            return True
        self.notify("stopping")
        # The child still accepts pending connections; close our sockets, so that no new ones arrive.
        self._sockets.close()
        deadline = time.monotonic() + grace
        while process.poll() is None:
            if time.monotonic() > deadline or (force is not None and force.is_set()):
                return False
            time.sleep(_POLL)
        return True

    def _close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # the process may have died
                self._process.stdin.close()

    def _write(self, line: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            return
        # If the process has died, `check_alive` will notice.
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()


def _address(bound: socket.socket) -> str:
    """Return host:port of a bound socket."""
    host, port, *_ = bound.getsockname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
