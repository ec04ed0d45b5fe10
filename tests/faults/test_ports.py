"""Access to ports: addresses, host names, proxies and keys, and which processes know the keys."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.openai.origin import Origin
from canvasrt.containers.package.package import repository_of
from canvasrt.containers.ports import Ports
from canvasrt.containers.serve import triton_command
from canvasrt.containers.serve.installation import Installation, find_installation
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.settings import Settings
from canvasrt.errors import CanvasError
from tests.faults.attack import GENERATE, PROMPT, ancestors, over_http
from tests.helpers.serving import eventually, needs_triton
from tests.helpers.serving_process import (
    ANY_PORTS,
    JSON,
    Reply,
    Serving,
    call,
    command_lines,
    serving,
)

pytestmark = needs_triton
ASK = {
    "model": "canvasrt",
    "messages": [{"role": "user", "content": "12+34="}],
    "max_tokens": 3,
    "max_denoising_steps": 2,
}


def port_of(address: str) -> int:
    match = re.search(r":(\d+)", address.removeprefix("http://"))
    assert match
    return int(match[1])


def post(running: Serving, headers: dict[str, str]) -> Reply:
    return call(running.host, "/v1/chat/completions", ASK, headers)


def listening(port: int) -> set[str]:
    """Return the addresses on which a port is open, in the notation of /proc/net/tcp."""
    found = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(address.removeprefix(_MAPPED))
    return found


LOOPBACK, ALL = "0100007F", "00000000"
_MAPPED = "0000000000000000FFFF0000"  # an IPv4 address on an IPv6 socket


def refused(bundle: Bundle, *options: str, **variables: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "canvasrt", "serve", str(bundle.path), *ANY_PORTS, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **variables}
    )
    return done.returncode, done.stderr


def test_an_old_triton_is_refused_anywhere_but_on_loopback(packaged: Bundle):
    code, errors = refused(packaged, "--triton-host", "0.0.0.0")
    assert code == 1
    assert "24.10" in errors
    assert "26.07" in errors


@pytest.mark.parametrize(
    ("release", "safe"), [("26.06", False), ("26.07", True), ("27.01", True), ("", False)]
)
def test_releases(release: str, safe: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NVIDIA_TRITON_SERVER_VERSION", release)
    assert Installation(Path("/opt/tritonserver/bin/tritonserver"), None).is_safe == safe
    bundled = find_installation()
    assert bundled.release == (24, 10)  # not what the environment says
    server = Server(Path("repository"), Settings(triton_host="0.0.0.0"))
    refused = pytest.raises(CanvasError, match="can crash it")
    with contextlib.nullcontext() if safe else refused:
        server._check_hosts(Installation(Path("tritonserver"), None))


def test_tritons_ports_are_no_way_around_tls(packaged: Bundle, certificates: Path):
    options = ["--triton-host", "0.0.0.0", "--ssl-mode", "tls"]
    options += ["--ssl-cert", str(certificates / "server.pem")]
    options += ["--ssl-key", str(certificates / "server.key")]
    code, errors = refused(packaged, *options)
    assert code == 2
    assert "Triton's ports have no TLS" in errors
    assert "--triton-behind-proxy" in errors
    assert refused(packaged, *options, "--triton-behind-proxy", "--dry-run")[0] == 0


def test_a_page_of_another_site_cannot_use_a_server_without_keys(running: Serving):
    assert post(running, JSON)[0] == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        status, body, _ = post(running, {"Content-Type": kind, "Origin": "http://example.com"})
        assert (status, body["error"]["code"]) == (415, "unsupported_media_type")
    assert post(running, {"Content-Type": "", "Sec-Fetch-Site": "cross-site"})[0] == 415
    assert post(running, {"Content-Type": ""})[0] == 200  # curl and Ollama's clients send none
    assert post(running, {"Content-Type": "application/json; charset=utf-8"})[0] == 200
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
        status, body, _ = post(running, {**JSON, "Host": host})
        assert (status, body["error"]["code"]) == (403, "host_not_allowed")
    for host in ("localhost", "LocalHost:1", "127.0.0.1:8000", "[::1]:8000", "[::1]"):
        assert post(running, {**JSON, "Host": host})[0] == 200


@pytest.mark.parametrize(
    ("options", "host", "allowed"),
    [
        (FrontOptions(), "evil.example", False),
        (FrontOptions(), "localhost:8000", True),
        (FrontOptions(host="0.0.0.0"), "evil.example", True),
        (FrontOptions(hosts=("*",)), "evil.example", True),
        (FrontOptions(host="0.0.0.0", hosts=("models.example",)), "Models.example:1", True),
        (FrontOptions(host="0.0.0.0", hosts=("models.example",)), "127.0.0.1", False),
    ],
)
def test_hosts_can_be_named(options: FrontOptions, host: str, allowed: bool):
    scope: dict[str, Any] = {"path": "/v1/models", "method": "GET"}
    scope["headers"] = [(b"host", host.encode())]
    Origin(options).check({**scope, "path": "/v1/health/ready"})  # probes use the address as host
    with contextlib.nullcontext() if allowed else pytest.raises(ApiError):
        Origin(options).check(scope)


class Proxy(threading.Thread):
    """A proxy that records connections. It must get none."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.calls: list[bytes] = []
        self.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                self.calls.append(connection.recv(100))


def test_what_a_guarded_server_shows_to_others(
    packaged: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Triton's ports are on loopback wherever the API listens, child processes do not know the keys, and internal calls
    bypass proxies. NIM's variables set the model's context and names."""
    secrets = ("CANVASRT_API_KEYS", "HF_TOKEN", "NGC_API_KEY")
    for name in secrets:
        monkeypatch.setenv(name, f"sesame-{name}")
    monkeypatch.setenv("NIM_MAX_MODEL_LEN", "64")
    monkeypatch.setenv("NIM_SERVED_MODEL_NAME", "diffusion,canvasrt")
    proxy = Proxy()
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
    # Without this variable, too, the product must keep ONNX Runtime from reporting usage.
    for name in ("no_proxy", "NO_PROXY", "ORT_DISABLE_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    with serving(packaged.path, tmp_path, *ANY_PORTS, "--host", "0.0.0.0") as running:
        port = port_of(running.said["openai"])
        assert listening(port) == {ALL}
        for name in ("http", "grpc", "metrics"):
            assert listening(port_of(running.said[name])) == {LOOPBACK}
        key = {"Authorization": "Bearer sesame-CANVASRT_API_KEYS"}
        assert post(running, {**JSON, **key})[0] == 200
        for wrong in ({}, {"Authorization": "Bearer wrong"}):
            assert post(running, {**JSON, **wrong})[0] == 401
        models = call(running.host, "/v1/models", headers=key).body["data"]
        assert [(each["id"], each["max_model_len"]) for each in models] == [
            ("diffusion", 64),
            ("canvasrt", 64),
        ]
        long = {**ASK, "max_tokens": 100}
        reply = call(running.host, "/v1/chat/completions", long, {**JSON, **key})
        assert (reply.status, reply.body["error"]["code"]) == (400, "context_length_exceeded")
        assert b"canvasrt_requests_in_flight" in call(f"127.0.0.1:{port}", "/v1/metrics").body
        children = [each for each in command_lines() if running.process.pid in ancestors(int(each))]
        assert len(children) >= 4  # Triton, two models, front end, guard
        for pid in children:
            assert b"sesame" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert b"sesame" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        command = [sys.executable, "-m", "canvasrt", "infer", "12+34=", "--protocol", "grpc"]
        command += ["--max-new-tokens", "3"]
        monkeypatch.setenv("CANVASRT_API_KEY", "sesame-CANVASRT_API_KEYS")
        command += ["--url", running.said["grpc"]]
        done = subprocess.run(command, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert proxy.calls == []
    proxy.socket.close()


INFER = "/v2/models/canvasrt/infer"


def tensor(shape: str, data: str) -> str:
    """Return the JSON text of an inference request, with these texts as shape and data of the prompt."""
    return f'{{"inputs": [{{"name": "prompt", "datatype": "BYTES", "shape": {shape}, "data": {data}}}]}}'


CLASSES = ', "outputs": [{"name": "text", "parameters": {"classification": 1}}]}'
CLASSIFIED = tensor("[1]", '["a"]')[:-1] + CLASSES


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        (GENERATE, PROMPT, {}, 200),
        (GENERATE, PROMPT, {"Content-Type": "application/x-www-form-urlencoded"}, 200),  # curl
        (GENERATE, PROMPT, {"Host": "evil.example"}, 403),  # a name that resolves to loopback
        (GENERATE, PROMPT, {"Content-Type": "text/plain", "Origin": "http://evil.example"}, 415),
        (GENERATE, "[" * 1_000_000, {}, 400),
        (GENERATE, "[" * 1_000_000, {"Inference-Header-Content-Length": "0"}, 400),
        (GENERATE, "[" * 1_000_000, {"Content-Encoding": "gzip"}, 415),
        (INFER, "[" * 1_000_000, {}, 400),
        (INFER, "{}", {"Inference-Header-Content-Length": "9"}, 400),
        # A shape of 2**93 elements would crash Triton. Of two fields with the same name, Triton reads the first, and
        # Python the last.
        (INFER, tensor("[1]", '["a"]'), {}, 200),
        (INFER, tensor("[2147483647, 2147483647, 2147483647]", "[1]"), {}, 400),
        (INFER, tensor('[2147483647, 2147483647, 2147483647], "shape": [1]', '["a"]'), {}, 400),
        # For classification, Triton divides by the size of the output's type, which is 0 for text.
        (INFER, CLASSIFIED, {}, 400),
        (GENERATE, "." * (17 * 2**20), {}, 413),
        ("/v2/health/ready", None, {}, 200),
    ],
    ids=range(15),
)
def test_tritons_http_port_is_guarded(
    running: Serving, path: str, body: Any, headers: dict[str, str], status: int
):
    assert over_http(running, path, body, headers)[0] == status
    assert over_http(running, GENERATE, PROMPT)[0] == 200  # the server still works


def test_nobody_else_reads_its_memory_or_calls_its_socket(running: Serving):
    pid = running.process.pid
    shared = [*Path("/dev/shm").glob(f"canvasrt-*-{pid}-*")]
    scratch = [
        *running.state.glob(f"tmp/canvasrt-*-{pid}-*"),
        *Path("/tmp").glob(f"canvasrt-*-{pid}-*"),
    ]
    assert [each for each in shared if not each.name.endswith("lock")]
    assert any((each / "http").is_socket() for each in scratch)
    assert not [each for each in shared + scratch if each.stat().st_mode & 0o077]


def test_tritons_streams_are_passed_on(running: Serving):
    status, text = over_http(running, "/v2/models/canvasrt_stream/generate_stream", PROMPT)
    assert status == 200
    assert text.count("data: ") >= 2
    with running.client() as client:
        assert client.infer(PROMPT).text


def test_what_the_process_list_says_opens_nothing(running: Serving):
    """Triton's restricted calls need a header, which its command line names."""
    line = command_lines()[str(running.said["pid"])]
    options = re.findall(r"restricted-(?:api|protocol)=(.*?)(?= --|$)", line, re.S)
    assert len(options) == 2
    for option in options:
        name, _, value = option.partition(":")[2].partition("=")
        value = value.strip()
        assert "\r\n" in name  # so no client can send this header
        ports = port_of(running.said["http"]), port_of(running.said["grpc"])
        for spelling in (name, name.strip()):
            assert not opened(*ports, spelling, value)


@pytest.mark.acceptance
def test_a_header_that_can_be_sent_would_open_them(
    packaged: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Shows that the test above can fail."""
    monkeypatch.setattr(triton_command, "_NO_HEADER", "closed")
    with (
        repository_of(packaged) as repository,
        Server(repository, Settings(ports=Ports(0, 0, 0), log=str(tmp_path / "log"))) as running,
    ):
        ports = running.ports.http, running.ports.grpc
        assert eventually(lambda: opened(*ports, "closed", "closed") == {"http", "grpc"})
        assert not opened(*ports, "closed", "wrong")


def opened(http_port: int, grpc_port: int, name: str, value: str) -> set[str]:
    """Return the protocols over which this header gives access to the list of models. The requests are built by hand,
    since libraries refuse such names."""
    found = set()
    raw = f"POST /v2/repository/index HTTP/1.1\r\nHost: a\r\n{name}: {value}\r\n"
    if b"canvasrt_stream" in talk(http_port, raw.encode() + b"Content-Length: 2\r\n\r\n{}"):
        found.add("http")

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags])
        return head + struct.pack(">I", stream) + payload

    def field(key: str, text: str) -> bytes:
        parts = [each.encode("latin-1") for each in (key, text)]
        return b"\x00" + b"".join(bytes([len(each)]) + each for each in parts)

    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/inference.GRPCInferenceService/RepositoryIndex",
        ":authority": "127.0.0.1",
        "content-type": "application/grpc",
        "te": "trailers",
        f"triton-grpc-protocol-{name}": value,
    }
    block = b"".join(field(*each) for each in headers.items())
    call = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
    call += frame(1, 4, 1, block) + frame(0, 1, 1, b"\x00\x00\x00\x00\x00")
    if b"canvasrt_stream" in talk(grpc_port, call):
        found.add("grpc")
    return found


def talk(port: int, sent: bytes) -> bytes:
    """Send bytes to a port; return what it answers within two seconds."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        connection.sendall(sent)
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                received += data
    return received
