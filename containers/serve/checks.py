"""Checks the settings of `canvasrt serve` before anything is built or started."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from canvasrt.containers.names import COLLECTOR, LOOPBACK
from canvasrt.containers.ports import PortRequest, check_distinct, listen
from canvasrt.containers.serve.gpus import check_gpus
from canvasrt.containers.serve.installation import find_installation
from canvasrt.containers.serve.settings import Settings
from canvasrt.errors import CanvasError, UsageError
from canvasrt.extras import require


def check_settings(settings: Settings) -> None:
    """Raise UsageError for contradictory options, and CanvasError for TLS files that cannot be used."""
    check_tracing()
    check_gpus(settings)
    _check_triton_host(settings)
    _check_tls_options(settings)
    check_distinct(_ports(settings))
    if settings.front.json_logs and settings.log_file is not None:
        raise UsageError(
            "--json-logs writes to stderr, but --log names a file", "leave out one of them"
        )
    if settings.log and not Path(settings.log).parent.is_dir():
        raise UsageError(f"the folder for --log {settings.log} does not exist", "create it first")
    if settings.tls is not None:
        _check_tls_files(**settings.tls)


def check_tracing() -> None:
    """Raise CanvasError if a collector of spans is configured, but OpenTelemetry's exporter is not installed."""
    if os.environ.get(COLLECTOR):
        require("opentelemetry.sdk.trace", "otel")
        require("opentelemetry.exporter.otlp.proto.http.trace_exporter", "otel")


def check_machine(settings: Settings) -> None:
    """Raise CanvasError if this machine has no usable Triton, or a port is in use."""
    find_installation().check_reach(settings.triton_host)
    for each in _ports(settings):
        listen(each.host, each.port, each.option).close()


def _ports(settings: Settings) -> list[PortRequest]:
    front = settings.front
    found = [PortRequest("--port", front.host, front.port)]
    if front.health_port is not None:
        found.append(PortRequest("--health-port", front.host, front.health_port))
    return found + settings.ports.requests(settings.triton_host, front.host)


def _check_triton_host(settings: Settings) -> None:
    """Raise UsageError if callers could use Triton's ports to bypass the API's TLS."""
    if settings.triton_host in LOOPBACK or settings.triton_behind_proxy or not settings.tls:
        return
    raise UsageError(
        f"--triton-host is {settings.triton_host}, but Triton's ports have no TLS",
        "leave out --triton-host; or add --triton-behind-proxy, and put a proxy with TLS that authenticates callers"
        f" in front of ports {settings.ports.http} and {settings.ports.grpc}",
    )


def _check_tls_options(settings: Settings) -> None:
    mode = settings.ssl_mode
    files = {
        "--ssl-cert": settings.ssl_cert,
        "--ssl-key": settings.ssl_key,
        "--ssl-ca": settings.ssl_ca,
    }
    given = [option for option, file in files.items() if file is not None]
    if mode is None and given:
        raise UsageError(
            f"{given[0]} has no effect without --ssl-mode", "add --ssl-mode tls or mtls"
        )
    needed = {"tls": 2, "mtls": 3}.get(mode or "", 0)
    for option in list(files)[:needed]:
        if option not in given:
            raise UsageError(f"--ssl-mode {mode} needs {option}", f"give {option} FILE")
    if mode == "tls" and "--ssl-ca" in given:
        raise UsageError(
            "--ssl-ca has no effect with --ssl-mode tls, which does not ask callers for a certificate",
            "give --ssl-mode mtls, or leave out --ssl-ca",
        )


def _check_tls_files(certificate: str, key: str, ca: str | None = None) -> None:
    """Load the TLS files as the front end will. Raises CanvasError with the option of an invalid file."""
    options = {"--ssl-cert": certificate, "--ssl-key": key} | ({"--ssl-ca": ca} if ca else {})
    for option, file in options.items():
        if not os.access(file, os.R_OK) or not Path(file).is_file():
            raise CanvasError(f"{option}: cannot read {file}", "check the path and its permissions")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for option in options.keys() - {"--ssl-key"}:
        try:
            context.load_verify_locations(options[option])
        except ssl.SSLError as error:
            raise CanvasError(
                f"{option}: {options[option]} holds no certificate", "give a PEM file"
            ) from error
    try:
        context.load_cert_chain(certificate, key, password=lambda: _refuse_password(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CanvasError(
                f"--ssl-key: {key} is not the key of the certificate {certificate}",
                "give the key for which the certificate was made",
            ) from error
        raise CanvasError(
            f"--ssl-cert and --ssl-key: OpenSSL cannot use {certificate} with {key}:"
            f" {error.reason or error}",
            "give a PEM certificate and its private key, also as PEM",
        ) from error


def _refuse_password(key: str) -> str:
    raise CanvasError(
        f"--ssl-key: {key} needs a password", "decrypt it: openssl pkey -in KEY -out FILE"
    )
