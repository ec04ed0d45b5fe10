"""The health check of a container: `python -m canvasrt.containers.serve.probe` exits with 0 if the server is ready.

It calls the port that NIM's variables name. It imports little, because it runs often. Docker does not restart unhealthy
containers. With CANVASRT_END_UNHEALTHY, the check therefore kills an unresponsive server; the container then exits, and
its restart policy applies.
"""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from canvasrt.containers.names import API_PORT, CHECK_TIMEOUT, END_UNHEALTHY, FAILED_CHECKS

_READY, _LIVE = "/v1/health/ready", "/v1/health/live"
# Numbers of consecutive failed checks after which a dead server gets SIGTERM, and after which it gets SIGKILL.
STOP_AFTER, KILL_AFTER = FAILED_CHECKS, 2 * FAILED_CHECKS


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Return 0 if the server is ready, else 1."""
    alive = True
    if environment.get(END_UNHEALTHY, "") not in ("", "0"):
        # A server that is loading or stopping is alive, although not ready.
        alive = _ask(environment, _LIVE) == 200
        _end_if_dead(alive, Path(tempfile.gettempdir()) / "canvasrt-probe")
    # Without an answer, the first call has used up the check's time, so do not call again.
    status = _ask(environment, _READY) if alive else None
    print(status)
    return 0 if status == 200 else 1


def _ask(environment: Mapping[str, str], path: str) -> int | None:
    """Return the HTTP status; None without an answer."""
    host = "127.0.0.1"
    health = environment.get("NIM_HEALTH_PORT", "").strip()
    given = (environment.get(name, "").strip() for name in ("NIM_SERVER_PORT", "NIM_HTTP_API_PORT"))
    port = int(health or next(filter(str.isdecimal, given), API_PORT))
    mode = environment.get("NIM_SSL_MODE", "").strip().lower()
    connection: http.client.HTTPConnection
    if mode in ("tls", "mtls") and not health:  # the separate health port has no TLS
        connection = http.client.HTTPSConnection(
            host, port, timeout=CHECK_TIMEOUT, context=_context(environment, mode)
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=CHECK_TIMEOUT)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        # With mtls, the check presents the server's own certificate, which may not be valid for clients.
        way_out = "; with mtls, set NIM_HEALTH_PORT" if mode == "mtls" and not health else ""
        print(f"{host}:{port}: {error}{way_out}", file=sys.stderr)
        return None
    finally:
        connection.close()


def _end_if_dead(alive: bool, file: Path) -> None:
    """Count in `file` the consecutive checks in which the server was dead. After too many, end the server.

    Counting starts after the server was alive for the first time.
    """
    if alive:
        file.write_text("0")
        return
    if not file.exists():
        return
    dead = int(file.read_text() or 0) + 1
    file.write_text(str(dead))
    if dead >= STOP_AFTER:
        number = signal.SIGKILL if dead >= KILL_AFTER else signal.SIGTERM
        for process in _servers(Path("/proc")):
            print(f"dead for {dead} checks: {number.name} to process {process}", file=sys.stderr)
            os.kill(process, number)
    if dead >= KILL_AFTER:
        file.unlink()  # the next server starts with a count of 0


def _servers(processes: Path) -> list[int]:
    """Return the ids of the processes that run `canvasrt serve`: the container's first process, or children of it."""
    found = []
    for folder in processes.glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
            # The name in parentheses may contain spaces; state and parent follow it.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if 1 in (int(folder.name), parent) and {"canvasrt", "serve"} <= set(words):
            found.append(int(folder.name))
    return found


def _context(environment: Mapping[str, str], mode: str) -> ssl.SSLContext:
    """Return a TLS context without verification, because the certificate is not for the loopback address."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if mode == "mtls":  # for mutual TLS, present the server's own certificate
        context.load_cert_chain(environment["NIM_SSL_CERTS_PATH"], environment["NIM_SSL_KEY_PATH"])
    return context


if __name__ == "__main__":
    sys.exit(main())
