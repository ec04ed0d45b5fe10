"""Runs tritonserver as a child process: starts it, waits until it is ready, stops it, cleans up."""

from __future__ import annotations

import contextlib
import http.client
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

from canvasrt.containers.heartbeat import reason_left
from canvasrt.containers.names import (
    HEARTBEAT_VARIABLE,
    LOOPBACK,
    REASON_VARIABLE,
    STOPPING_VARIABLE,
)
from canvasrt.containers.ports import Ports, callable_host, url_host
from canvasrt.containers.processes import (
    children,
    die_with_parent,
    end_group,
    is_running,
    remove_shm,
    remove_stale,
    run_name,
)
from canvasrt.containers.serve.guard import Guard
from canvasrt.containers.serve.installation import Installation, find_installation
from canvasrt.containers.serve.logtail import cause_in, last_lines
from canvasrt.containers.serve.stall import StallWatch
from canvasrt.containers.serve.timeouts import EXIT_TIMEOUT, READY_TIMEOUT
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.errors import CanvasError, EngineError, StalledError

UNLOAD_TIMEOUT = 3  # seconds for unloading the models, after requests in flight
PROBE_TIMEOUT = 5.0
# Files in the scratch folder.
_STOPPING, _HEARTBEAT, _REASON = "stopping", "heartbeat", "reason"
# These change the server, or make it read and write shared memory. No caller needs them.
_CLOSED = "model-repository,shared-memory,logging,trace"
# The header that would open them. Arguments keep no secret, so it is one that cannot be sent.
_NO_HEADER = "closed\r\n"
POLL = 0.05


class Server:
    """One tritonserver over one model repository.

    As a context manager, it starts the server and waits until it is ready, and at the end stops it
    and removes its processes, shared memory and scratch folder. Start it on a thread that outlives
    it: the server stops when that thread ends.
    """

    def __init__(
        self,
        repository: Path,
        *,
        host: str = "127.0.0.1",
        metrics_host: str | None = None,
        ports: Ports | None = None,
        log: Path | None = None,
        exit_timeout: float = EXIT_TIMEOUT,
        model: ModelOptions | None = None,
        output: int | None = None,
        recent: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        """Prepare a server; nothing is started yet.

        host: what Triton's HTTP and gRPC listen on. metrics_host: the same for its metrics, unless
        its release may be reached from this machine only.
        log: a file to append the server's output to; None sends it to stderr, or to the descriptor
        `output`, whose last lines are in `recent`.
        model: what the models are given. options: further options of tritonserver.
        """
        self.repository = repository
        self.host = host
        self.metrics_host = metrics_host or host
        self.ports = ports or Ports()
        self.log = log
        self.exit_timeout = exit_timeout
        self._model_options = model or ModelOptions()
        self.request_timeout = self._model_options.completed(os.environ).request_timeout  # seconds
        self._output_descriptor = output
        self._recent = recent
        self._options = tuple(options)
        self.run_name = run_name()
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self._models: set[int] = set()
        self._stall: StallWatch | None = None

    @property
    def address(self) -> str:
        """The host to call: the loopback address if the server listens on all."""
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
    def is_running(self) -> bool:
        """Whether the server's process and those of its models are running."""
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
        at_once = threading.Event()
        if kind is not None:  # nobody waits for answers any more
            at_once.set()
        self.stop(force=at_once)

    def start(self) -> None:
        """Start the process. CanvasError for a port in use, or without a tritonserver."""
        installation = find_installation()
        self._check_hosts(installation)
        self.ports = self.ports.with_free_ones(self.host, self.metrics_host)
        remove_stale()
        try:
            command = self._command(installation)
            with self._output() as output:
                self._process = subprocess.Popen(
                    command,
                    env=self._environment(installation),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT if output else None,
                    start_new_session=True,  # Ctrl-C is for this process, which then stops the server
                    preexec_fn=die_with_parent(),
                )
            self._guard = Guard(self.run_name)
        except BaseException as error:
            if self._process is not None:
                end_group(self._process.pid, grace=0)
                self._process = None
            self._clean()
            if isinstance(error, OSError):
                raise CanvasError(
                    f"cannot start {installation.binary}: {error}", "run `canvasrt doctor`"
                ) from error
            raise

    def _check_hosts(self, installation: Installation) -> None:
        """Raise CanvasError when callers from elsewhere could reach a release that they can crash."""
        installation.check_reach(self.host)
        if not installation.is_safe and self.metrics_host not in LOOPBACK:
            self.metrics_host = self.host

    def wait_ready(
        self,
        timeout: float = READY_TIMEOUT,
        interrupted: threading.Event | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Wait until every model is ready, or `interrupted` is set; `meanwhile` is called
        repeatedly.

        CanvasError when the server ends, or `timeout` seconds pass.
        """
        deadline = time.monotonic() + timeout
        while not (interrupted and interrupted.is_set()):
            self.check_alive()
            if meanwhile is not None:
                meanwhile()
            if self.is_ready():
                self._models = self._model_processes()
                if self._folder is not None:
                    self._stall = StallWatch(self._folder / _HEARTBEAT, self._answers)
                return
            if time.monotonic() > deadline:
                raise CanvasError(
                    f"tritonserver was not ready after {timeout:g} s",
                    "allow more time with --ready-timeout" + self._log_hint(),
                    self.log_tail(),
                )
            time.sleep(POLL)

    def is_ready(self) -> bool:
        """Return whether the server and all its models are ready."""
        return bool(self._get("http", "/v2/health/ready"))

    def _answers(self) -> bool:
        return bool(self._get("http", "/v2/health/live", timeout=1.0))

    def check_alive(self) -> None:
        """Raise CanvasError, with the cause from the log, when the server or a model's process has
        ended.

        Without a decoupled model's process Triton stays ready, but every request fails.
        """
        code = self._process.poll() if self._process else None
        if code is None:
            if any(not is_running(model) for model in self._models):
                reason = reason_left(self._folder / _REASON) if self._folder else None
                if reason is not None:
                    raise EngineError(reason[0], reason[1] + self._log_hint(), self.log_tail())
                raise CanvasError(
                    "a model's process has ended, perhaps because memory ran out",
                    "start the server again; its output may say why" + self._log_hint(),
                    self.log_tail(),
                )
            if self._guard is not None:
                self._guard.check()
            return
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        cause = cause_in(self.log_tail(1000))
        raise CanvasError(
            f"tritonserver stopped with {how}" + (f": {cause}" if cause else ""),
            "see its output" + self._log_hint(),
            self.log_tail(),
        )

    def check_progress(self, limit: float) -> None:
        """Raise StalledError when a process is stopped, or when there was no progress for `limit`
        seconds: no step of the engines, or no answer of Triton."""
        if self._stall is None or self._process is None:
            return
        if how := self._stall.stalled({*self._models, self._process.pid}, limit):
            raise StalledError(
                f"the server {how}",
                "allow more time for a pass with --stall-timeout, or see what holds it up"
                + self._log_hint(),
                self.log_tail(),
            )

    def stop(self, force: threading.Event | None = None) -> bool:
        """Stop the server and clean up; return whether all requests finished.

        Requests in flight get `exit_timeout` seconds; setting `force` ends the wait at once.
        """
        try:
            return self._process is None or self._end(self._process, force)
        except BaseException:  # a second Ctrl-C that nobody handles
            if self._process is not None:
                end_group(self._process.pid, grace=0)
            raise
        finally:
            self._process = None
            self._clean()

    def refuse(self) -> None:
        """Make the models refuse new requests; those in flight continue."""
        if self._folder is not None:
            (self._folder / _STOPPING).touch()

    def _end(self, process: subprocess.Popen[bytes], force: threading.Event | None) -> bool:
        drained = self._drain(force)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        ended = _wait(process, UNLOAD_TIMEOUT + 5, force)
        end_group(process.pid, grace=1.0 if ended else 0.0)
        process.wait()
        return drained

    def _model_processes(self) -> set[int]:
        """Return the models' processes, which Triton starts: one for each."""
        return children(self._process.pid) if self._process else set()

    def _drain(self, force: threading.Event | None) -> bool:
        """Wait until no request is in flight; return whether that happened in time.

        Triton's own wait also counts idle connections. Most clients keep one open, which would hold
        it up until its timeout.
        """
        if force and force.is_set():
            return False
        deadline = time.monotonic() + self.exit_timeout
        self.refuse()
        # Look twice: a request may not be counted yet.
        quiet = 0
        while quiet < 2:
            quiet = 0 if self._in_flight() else quiet + 1
            if time.monotonic() > deadline or (force and force.is_set()):
                return quiet > 0
            time.sleep(POLL)
        return True

    def _in_flight(self) -> int:
        """Return how many requests run or wait, by the server's metrics; 0 without an answer."""
        found = re.search(
            rb"^canvasrt_requests_in_flight (\S+)", self._get("metrics", "/metrics"), re.M
        )
        return int(float(found[1])) if found else 0

    def _get(self, port: str, path: str, timeout: float = PROBE_TIMEOUT) -> bytes:
        """Return the body of a page of the server; empty unless the status is 200."""
        host = callable_host(self.metrics_host) if port == "metrics" else self.address
        connection = http.client.HTTPConnection(host, getattr(self.ports, port), timeout=timeout)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            # An empty page counts as an answer.
            return reply.read() or b"\n" if reply.status == 200 else b""
        except (OSError, http.client.HTTPException):
            return b""
        finally:
            connection.close()

    def log_tail(self, lines: int = 20) -> list[str]:
        """Return the last lines of the log, without Triton's tables."""
        found = list(self._recent) if self.log is None else last_lines(self.log)
        return [line for line in found if line.strip() and line[0] not in "|+"][-lines:]

    def _command(self, installation: Installation) -> list[str]:
        self._folder = Path(tempfile.mkdtemp(prefix=self.run_name))
        backend = installation.prepare(self._folder) if installation.bundled else []
        command = [
            str(installation.binary),
            f"--model-repository={self.repository}",
            *backend,
            # The configurations are complete; auto-completion would start each model's process
            # twice.
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={UNLOAD_TIMEOUT}",
            f"--backend-config=python,shm-region-prefix-name={self.run_name}",
            # How long a model may take to load.
            f"--backend-config=python,stub-timeout-seconds={READY_TIMEOUT:.0f}",
        ]
        for name in ("http", "grpc", "metrics"):
            host = self.metrics_host if name == "metrics" else self.host
            command.append(f"--{name}-address={host}")
            command.append(f"--{name}-port={getattr(self.ports, name)}")
        for option in ("http-restricted-api", "grpc-restricted-protocol"):
            command.append(f"--{option}={_CLOSED}:{_NO_HEADER}=closed")
        if not Path("/dev/nvidiactl").exists():
            command.append("--allow-gpu-metrics=false")
        return [*command, *self._options]

    def _environment(self, installation: Installation) -> dict[str, str]:
        env = installation.environment()
        env |= self._model_options.to_environment()
        if self._folder is not None:
            env[STOPPING_VARIABLE] = str(self._folder / _STOPPING)
            env[HEARTBEAT_VARIABLE] = str(self._folder / _HEARTBEAT)
            env[REASON_VARIABLE] = str(self._folder / _REASON)
        return env

    @contextlib.contextmanager
    def _output(self) -> Iterator[IO[bytes] | None]:
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as file:
                yield file
        elif self._output_descriptor is not None:
            with open(self._output_descriptor, "wb", closefd=False) as file:
                yield file
        else:
            yield None

    def _log_hint(self) -> str:
        return f"; the log is {self.log}" if self.log else ""

    def _clean(self) -> None:
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None
        remove_shm(self.run_name)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _wait(process: subprocess.Popen[bytes], seconds: float, force: threading.Event | None) -> bool:
    """Return whether the process ended by itself, and thus ended its models too."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline or (force and force.is_set()):
            return False
        time.sleep(POLL)
    return process.returncode == 0
