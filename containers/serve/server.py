"""Runs tritonserver as a child process: starts it, waits until it is ready, stops it, cleans up."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from canvasrt.containers.client.connection import fetch
from canvasrt.containers.heartbeat import reason_left
from canvasrt.containers.names import LOOPBACK, READY_TIMEOUT
from canvasrt.containers.ports import callable_host, url_host
from canvasrt.containers.processes import (
    children,
    die_with_parent,
    end_group,
    holding,
    is_running,
    protect_shm,
    remove_stale,
    run_name,
)
from canvasrt.containers.serve.guard import Guard
from canvasrt.containers.serve.installation import Installation, find_installation
from canvasrt.containers.serve.output import ServerOutput, cause_in, last_lines
from canvasrt.containers.serve.settings import Settings
from canvasrt.containers.serve.stall import StallWatch
from canvasrt.containers.serve.triton_command import (
    EVIDENCE,
    HEARTBEAT,
    REASON,
    STOPPING,
    UNLOAD_TIMEOUT,
    triton_command,
    triton_environment,
)
from canvasrt.errors import CanvasError, EngineError, StalledError
from canvasrt.machine import gpus

log = logging.getLogger(__name__)

POLL = 0.05
AT_ONCE = threading.Event()  # pass this as `force` to stop without waiting
AT_ONCE.set()
_LOST = 10.0  # seconds for Triton to report that a model's process died while loading


class Server:
    """One tritonserver that serves one model repository.

    As a context manager, it starts the server, waits until it is ready, and at the end stops it and cleans up. The
    thread that starts it must outlive it, because the server stops when that thread exits.
    """

    def __init__(
        self,
        repository: Path,
        settings: Settings | None = None,
        output: ServerOutput | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        """Prepare a server; nothing is started yet.

        output: takes the server's output if the settings name no log file; None means stderr. gpus: UUIDs of the GPUs;
        every GPU runs an instance of the model. Without UUIDs, only CUDA's first GPU runs one. If the settings have a
        folder `sockets`, Triton's HTTP and gRPC servers listen on Unix sockets in that folder, and the front end
        listens on their ports.
        """
        settings = settings or Settings()
        self.repository = repository
        self.settings = settings
        self.host, self.metrics_host = settings.triton_host, settings.front.host
        self.ports = settings.ports
        self.log = output.log if output else settings.log_file
        self.sockets = settings.sockets
        self.exit_timeout: float = settings.exit_timeout
        self.request_timeout = settings.model.completed(os.environ).request_timeout  # seconds
        self._ready_timeout = (
            READY_TIMEOUT if settings.ready_timeout is None else settings.ready_timeout
        )
        self._stream = output
        self._gpus = tuple(gpus)
        self.run_name = run_name()
        self._cleanup = contextlib.ExitStack()
        self._folder: Path | None = None  # the scratch folder, while the server runs
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self._models: set[int] = set()
        self._stall: StallWatch | None = None

    @property
    def address(self) -> str:
        """The address at which to call the server."""
        return callable_host(self.host)

    @property
    def metrics_url(self) -> str:
        """The address of Triton's metrics."""
        return f"http://{url_host(self.metrics_host)}:{self.ports.metrics}/metrics"

    @property
    def pid(self) -> int | None:
        """The server's process id; None while it is not running."""
        return self._process.pid if self._process else None

    @property
    def evidence(self) -> str:
        """Whether requests share passes, and why, as JSON; empty if that was not tested."""
        file = self._folder / EVIDENCE if self._folder else None
        return file.read_text("utf-8") if file and file.exists() else ""

    @property
    def is_running(self) -> bool:
        """Whether the server's process and its models' processes are running."""
        alive = self._process is not None and self._process.poll() is None
        return alive and all(is_running(model) for model in self._models)

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_ready()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.stop(force=AT_ONCE if kind else None)  # after an error, do not wait for requests

    def start(self) -> None:
        """Start the process. Raises CanvasError if a port is in use or tritonserver is missing."""
        installation = find_installation()
        self._check_hosts(installation)
        remove_stale()
        try:
            ports = self.ports.held(self.host, self.metrics_host, not self.sockets)
            self.ports = self._cleanup.enter_context(ports)
            self._folder = Path(tempfile.mkdtemp(prefix=self.run_name))
            self._cleanup.callback(shutil.rmtree, self._folder, ignore_errors=True)
            held = self._cleanup.enter_context(holding(self.run_name))
            with self._output() as output:
                self._process = subprocess.Popen(
                    self._command(installation, self._folder),
                    env=self._environment(installation, self._folder),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT if output else None,
                    pass_fds=[held],
                    start_new_session=True,  # so that Ctrl-C only reaches this process, which stops the server
                    preexec_fn=die_with_parent(),
                )
            self._guard = Guard(self.run_name)
            self._cleanup.callback(self._guard.dismiss)
        except BaseException as error:
            if self._process is not None:
                end_group(self._process.pid, grace=0)
            self._forget()
            if isinstance(error, OSError):
                raise CanvasError(
                    f"cannot start {installation.binary}: {error}", "run `canvasrt doctor`"
                ) from error
            raise

    def _check_hosts(self, installation: Installation) -> None:
        """Keep other machines from reaching a release that one request can crash. If they can call `host`, raise
        CanvasError; if they can call only `metrics_host`, serve the metrics on `host` instead."""
        installation.check_reach(self.host)
        if not installation.is_safe and self.metrics_host not in LOOPBACK:
            self.metrics_host = self.host

    def wait_ready(
        self,
        interrupted: threading.Event | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `meanwhile` repeatedly until all models are ready, or `interrupted` is set. If the server
        crashes while it loads models, it is started again, once.

        Raises CanvasError if the server exits, or after `ready_timeout` seconds.
        """
        try:
            self._wait_ready(interrupted, meanwhile)
        except CanvasError as error:
            if not self._has_crashed() or isinstance(error, EngineError):
                raise
            log.warning("%s; starting it again", error.message)
            self.stop(force=AT_ONCE)
            self.start()
            self._wait_ready(interrupted, meanwhile)

    def _has_crashed(self) -> bool:
        """Return whether the server or a model's process has crashed. Rarely, a lock of Triton's Python backend fails
        while models are loading, which aborts the server or a model's process."""
        if self._process is None:
            return False
        code = self._process.poll()
        if code is None:
            return bool(children(self._process.pid)[1])
        # If a model's process had answered before it died, Triton logs that the process is not healthy.
        lost = any("is not healthy" in line for line in self.log_tail(40))
        return code == -signal.SIGABRT or lost

    def _wait_ready(
        self, interrupted: threading.Event | None, meanwhile: Callable[[], None]
    ) -> None:
        deadline = time.monotonic() + self._ready_timeout
        whole = time.monotonic()  # the last time at which no child process was dead
        while not (interrupted and interrupted.is_set()):
            self.check_alive()
            meanwhile()
            protect_shm(self.run_name)
            running, dead = children(self.pid or 0)
            whole = whole if dead else time.monotonic()
            if time.monotonic() > whole + _LOST:  # Triton itself would wait until the timeout
                raise self._model_lost()
            if not dead and self._get("http", "/v2/health/ready"):
                self._models = running
                protect_shm(self.run_name)
                if self._folder is not None:
                    self._stall = StallWatch(self._folder / HEARTBEAT, self._answers)
                return
            if time.monotonic() > deadline:
                message = f"tritonserver was not ready after {self._ready_timeout:g} s"
                raise self._failure(message, "allow more time with --ready-timeout")
            time.sleep(POLL)

    def _answers(self) -> bool:
        return bool(self._get("http", "/v2/health/live", timeout=1.0))

    def check_alive(self) -> None:
        """Raise CanvasError, with the cause from the log, if the server's or a model's process has exited.

        Without the decoupled model's process, Triton remains ready, but every request fails.
        """
        code = self._process.poll() if self._process else None
        if code is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            cause = cause_in(self.log_tail(1000))
            message = f"tritonserver stopped with {how}" + (f": {cause}" if cause else "")
            raise self._failure(message, "see its output")
        if any(not is_running(model) for model in self._models):
            raise self._model_lost()
        if self._guard is not None:
            self._guard.check()

    def _model_lost(self) -> CanvasError:
        reason = reason_left(self._folder / REASON) if self._folder else None
        if reason is not None:
            return self._failure(*reason, kind=EngineError)
        message = "a model's process has ended, perhaps because memory ran out"
        return self._failure(message, "start the server again; its output may say why")

    def check_progress(self, limit: float) -> None:
        """Raise StalledError if a process is stopped by a signal, or after `limit` seconds without a step or without an
        answer from Triton."""
        if self._stall is None or self._process is None:
            return
        if how := self._stall.stalled({*self._models, self._process.pid}, limit):
            hint = "allow more time for a pass with --stall-timeout, or find out what holds it up"
            raise self._failure(f"the server {how}", hint, kind=StalledError)

    def stop(self, force: threading.Event | None = None) -> bool:
        """Stop the server and clean up; return whether all requests finished.

        Requests in flight get `exit_timeout` seconds. Setting `force` ends the wait immediately.
        """
        try:
            return self._process is None or self._end(self._process, force)
        except BaseException:  # such as a second Ctrl-C
            if self._process is not None:
                end_group(self._process.pid, grace=0)
            raise
        finally:
            self._forget()

    def _end(self, process: subprocess.Popen[bytes], force: threading.Event | None) -> bool:
        drained = self._drain(force)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        ended = _wait(process, UNLOAD_TIMEOUT + 5, force)
        end_group(process.pid, grace=1.0 if ended else 0.0)
        process.wait()
        return drained

    def _drain(self, force: threading.Event | None) -> bool:
        """Make the models refuse new requests; return whether those in flight finished in time.

        Triton's own drain also waits for idle connections until its timeout, and most clients keep a connection open.
        """
        if force and force.is_set():
            return False
        deadline = time.monotonic() + self.exit_timeout
        if self._folder is not None:
            (self._folder / STOPPING).touch()
        # Check twice, because a request that has just arrived is not counted yet.
        quiet = 0
        while quiet < 2:
            quiet = 0 if self._in_flight() else quiet + 1
            if time.monotonic() > deadline or (force and force.is_set()):
                return quiet > 0
            time.sleep(POLL)
        return True

    def _in_flight(self) -> int:
        """Return the number of running and waiting requests from the server's metrics; 0 without metrics."""
        page = self._get("metrics", "/metrics")
        found = re.search(rb"^canvasrt_requests_in_flight (\S+)", page, re.M)
        return int(float(found[1])) if found else 0

    def _get(self, port: str, path: str, timeout: float = 5.0) -> bytes:
        """Return the body of a page of the server; empty unless the status is 200."""
        host = callable_host(self.metrics_host) if port == "metrics" else self.address
        unix = self.sockets / "http" if self.sockets and port == "http" else None
        return fetch(host, getattr(self.ports, port), path, timeout, unix)

    def log_tail(self, lines: int = 20) -> list[str]:
        """Return the last lines of the log, without Triton's tables."""
        found = (
            last_lines(self.log) if self.log else list(self._stream.recent if self._stream else ())
        )
        return [line for line in found if line.strip() and line[0] not in "|+"][-lines:]

    def _failure(
        self, message: str, hint: str, kind: type[CanvasError] = CanvasError
    ) -> CanvasError:
        """Return an error that includes the end of the log."""
        return kind(
            message, hint + (f"; the log is {self.log}" if self.log else ""), self.log_tail()
        )

    def _command(self, installation: Installation, folder: Path) -> list[str]:
        for file in self.sockets.iterdir() if self.sockets else ():
            file.unlink()  # left by an earlier server
        addresses = {
            name: (f"unix:{self.sockets / name}" if self.sockets else self.host, port)
            for name, port in (("http", self.ports.http), ("grpc", self.ports.grpc))
        }
        addresses["metrics"] = (self.metrics_host, self.ports.metrics)
        return triton_command(
            installation,
            folder,
            self.repository,
            self.run_name,
            addresses,
            len(self._gpus) or len(gpus()),
            self._ready_timeout,
            self.settings.triton_options,
        )

    def _environment(self, installation: Installation, folder: Path) -> dict[str, str]:
        model, cache = self.settings.model, self.settings.cache
        return triton_environment(installation, folder, model, cache, self._gpus)

    @contextlib.contextmanager
    def _output(self) -> Iterator[IO[bytes] | None]:
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as file:
                yield file
        elif self._stream is not None and self._stream.descriptor is not None:
            with open(self._stream.descriptor, "wb", closefd=False) as file:
                yield file
        else:
            yield None

    def _forget(self) -> None:
        """Remove the leftovers of the exited process."""
        self._process = self._guard = self._folder = None
        self._cleanup.close()


def _wait(process: subprocess.Popen[bytes], seconds: float, force: threading.Event | None) -> bool:
    """Wait for the process to exit. Return whether it exited in time and without an error; if so, its models have
    ended, too."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline or (force and force.is_set()):
            return False
        time.sleep(POLL)
    return process.returncode == 0
