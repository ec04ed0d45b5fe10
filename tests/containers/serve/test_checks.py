"""Wrong settings of `canvasrt serve` are detected before a build."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from canvasrt.bundle import load_bundle
from canvasrt.cli.app import run
from canvasrt.containers.ports import PortRequest, check_distinct
from canvasrt.containers.serve import local
from canvasrt.containers.serve.checks import check_settings
from canvasrt.containers.serve.settings import read_settings
from canvasrt.errors import CanvasError, UsageError
from canvasrt.runtime.bundle_facts import max_context
from canvasrt.runtime.open import open_model
from tests.helpers import library
from tests.helpers.serving_process import ANY_PORTS


@pytest.mark.parametrize(
    ("certificate", "key", "ca", "says"),
    [
        ("server.pem", "server.key", "ca.pem", None),
        ("server.pem", "server.key", None, None),
        ("missing", "server.key", None, "--ssl-cert: cannot read"),
        (".", "server.key", None, "--ssl-cert: cannot read"),
        ("server.pem", "missing", None, "--ssl-key: cannot read"),
        ("server.pem", "server.key", "missing", "--ssl-ca: cannot read"),
        ("san", "server.key", None, "--ssl-cert: .*san holds no certificate"),
        ("server.key", "server.key", None, "--ssl-cert: .* holds no certificate"),
        ("server.pem", "server.key", "san", "--ssl-ca: .* holds no certificate"),
        ("server.pem", "san", None, "OpenSSL cannot use"),
        ("server.pem", "caller.key", None, "is not the key of the certificate"),
        ("server.pem", "locked.key", None, "locked.key needs a password"),
    ],
)
def test_tls_files_are_loaded(
    certificates: Path, certificate: str, key: str, ca: str | None, says: str | None
):
    given: dict[str, Any] = {"ssl_cert": certificates / certificate, "ssl_key": certificates / key}
    given |= {"ssl_mode": "mtls", "ssl_ca": certificates / ca} if ca else {"ssl_mode": "tls"}
    settings = read_settings(given, {}, {})
    if says is None:
        check_settings(settings)
        return
    with pytest.raises(CanvasError, match=says) as refused:
        check_settings(settings)
    assert not isinstance(refused.value, UsageError)
    assert refused.value.hint


def test_tls_that_is_turned_off_may_keep_its_files():
    given = {"ssl_mode": "disabled", "ssl_cert": Path("missing")}
    check_settings(read_settings(given, {}, {}))


@pytest.mark.parametrize(
    ("hosts", "ports", "clashes"),
    [
        (("127.0.0.1", "127.0.0.1"), (80, 80), True),
        (("127.0.0.1", "0.0.0.0"), (80, 80), True),
        (("::", "::1"), (80, 80), True),
        (("127.0.0.1", "127.0.0.1"), (0, 0), False),
        (("127.0.0.1", "127.0.0.1"), (80, 81), False),
        (("127.0.0.1", "10.0.0.1"), (80, 80), False),
    ],
)
def test_one_port_for_two_options(hosts: tuple[str, str], ports: tuple[int, int], clashes: bool):
    asked = [PortRequest("--a", hosts[0], ports[0]), PortRequest("--b", hosts[1], ports[1])]
    if not clashes:
        check_distinct(asked)
        return
    with pytest.raises(UsageError, match="--a and --b are both 80"):
        check_distinct(asked)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("tls", "is not the key"),
        ("port", "is in use.* with --health-port"),
        ("triton", "which is not a program"),
        ("host", "can crash it"),
    ],
)
def test_a_checkpoint_is_not_built_for_settings_that_cannot_work(
    case: str,
    says: str,
    certificates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(local, "build_local", lambda *_: pytest.fail("it was built"))
    options = [*ANY_PORTS, "--cache", str(tmp_path)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        if case == "tls":
            options += ["--ssl-mode", "tls", "--ssl-cert", str(certificates / "server.pem")]
            options += ["--ssl-key", str(certificates / "caller.key")]
        elif case == "port":
            options += ["--health-port", str(taken.getsockname()[1])]
        elif case == "triton":
            monkeypatch.setenv("CANVASRT_TRITONSERVER", str(tmp_path))
        else:
            options += ["--triton-host", "0.0.0.0"]
        assert run(["serve", "demo", *options]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert re.search(says, f"{error} {hint}")
    assert hint.startswith("hint: ")
    assert not list(tmp_path.iterdir())


def test_a_context_beyond_the_engines_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    bundle = library.bundle("demo")
    most = max_context(load_bundle(bundle, check=False).manifest)
    command = ["serve", str(bundle), "--dry-run", "--max-model-len"]
    assert run([*command, str(most)]) == 0
    assert run([*command, str(most + 1)]) == 2
    error = capsys.readouterr().err
    assert f"{most + 1}, but the engines support at most {most}" in error
    assert f"give at most {most}" in error
    with pytest.raises(UsageError, match="but the engines support at most"):
        open_model(bundle, check=False, max_context=most + 1)
