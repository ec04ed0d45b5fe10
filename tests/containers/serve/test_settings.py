"""The settings of `canvasrt serve`: their sources, and which source takes precedence."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from canvasrt.bundle import Bundle, Manifest
from canvasrt.cli.app import run
from canvasrt.containers.openai.options import FrontOptions
from canvasrt.containers.package.image_settings import CACHE, settings_for
from canvasrt.containers.serve.installation import find_installation
from canvasrt.containers.serve.server import Server
from canvasrt.containers.serve.settings import Settings, read_settings
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.errors import CanvasError, UsageError
from canvasrt.runtime.open import _compiled_kernels
from tests.conftest import Command


def from_environment(**variables: str) -> Settings:
    return read_settings({}, {}, variables)


def test_the_defaults_are_nims_ports():
    settings = from_environment()
    assert (settings.front.port, settings.ports.http) == (8000, 8080)
    assert (settings.ports.grpc, settings.ports.metrics) == (8001, 8002)
    assert settings.front.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("variable", "value", "setting", "expected"),
    [
        ("NIM_MODEL_PROFILE", "tensorrt-fp8-tp1-pp1", "profile", "tensorrt-fp8-tp1-pp1"),
        ("NIM_MODEL_PATH", "/models/a", "bundle", Path("/models/a")),
        ("NIM_CACHE_PATH", "/cache", "cache", Path("/cache")),
        ("NIM_SERVER_PORT", "9000", "front.port", 9000),
        ("NIM_HEALTH_PORT", "9001", "front.health_port", 9001),
        ("NIM_LOG_LEVEL", "debug", "front.log_level", "DEBUG"),
        ("NIM_LOG_LEVEL", "DEFAULT", "front.log_level", "INFO"),
        ("NIM_JSONL_LOGGING", "1", "front.json_logs", True),
        ("NIM_SERVED_MODEL_NAME", "a, b", "front.names", ("a", "b")),
        ("NIM_MAX_MODEL_LEN", "2048", "model.max_model_len", 2048),
        ("NIM_SSL_MODE", "MTLS", "ssl_mode", "mtls"),
        ("NIM_SSL_CERTS_PATH", "/c", "ssl_cert", Path("/c")),
        ("NIM_SSL_KEY_PATH", "/k", "ssl_key", Path("/k")),
        ("NIM_SSL_CA_CERTS_PATH", "/ca", "ssl_ca", Path("/ca")),
    ],
)
def test_a_variable_of_nims(variable: str, value: str, setting: str, expected: Any):
    assert attrgetter(setting)(from_environment(**{variable: value})) == expected


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("NIM_SERVER_PORT", "70000", "not a port number"),
        ("NIM_MAX_MODEL_LEN", "0", "not a whole number above 0"),
        ("NIM_JSONL_LOGGING", "maybe", "not 0 or 1"),
        ("NIM_DISABLE_MODEL_DOWNLOAD", "often", "not 0 or 1"),
        ("NIM_LOG_LEVEL", "loud", "not one of TRACE"),
        ("NIM_SSL_MODE", "on", "not one of disabled"),
        ("NIM_MODEL_PATH", "hf://a/b", "nothing is downloaded"),
        ("NIM_SERVED_MODEL_NAME", ",", "contains no name"),
        ("NIM_TENSOR_PARALLEL_SIZE", "2", "is not supported"),
        ("NIM_ENABLE_KV_CACHE_REUSE", "1", "is not supported"),
        ("NIM_TRITON_HTTP_PORT", "9000", "is not supported"),
        ("NIM_TRITON_METRICS_PORT", "x", "not a port number"),
    ],
)
def test_what_cannot_be_done_is_an_error(variable: str, value: str, says: str):
    with pytest.raises(UsageError, match=variable) as caught:
        from_environment(**{variable: value})
    assert says in caught.value.message
    assert caught.value.hint


def test_variables_that_mean_nothing():
    links = {"NIM_LLM_SERVICE_HOST": "10.0.0.1", "NIM_LLM_PORT_8000_TCP_ADDR": "10.0.0.1"}
    links |= {"NIM_LLM_SERVICE_PORT_HTTP": "80", "NIM_LLM_PORT": "tcp://10.0.0.1:80"}
    links["NIM_SERVER_PORT"] = "tcp://10.0.0.1:80"  # set for a service named nim-server
    links["NIM_DISABLE_MODEL_DOWNLOAD"] = "1"  # there are no downloads
    assert from_environment(NIM_MODEL_PROFILE=" ", **links) == from_environment()


def test_the_ports_of_nvidias_operator():
    """The variables that a NIMService sets are ports, not the address of a Kubernetes service."""
    same = {"NIM_SERVER_PORT": "9000", "NIM_HTTP_API_PORT": "9000"}
    more = {"NIM_GRPC_API_PORT": "9001", "NIM_TRITON_GRPC_PORT": "9001"}
    found = from_environment(**same, **more, NIM_TRITON_METRICS_PORT="9002")
    assert (found.front.port, found.ports.grpc, found.ports.metrics) == (9000, 9001, 9002)
    assert from_environment(NIM_HTTP_API_PORT="9000").front.port == 9000


def test_the_command_line_wins_over_passthrough_over_the_environment():
    environment = {"NIM_SERVER_PORT": "1", "NIM_HEALTH_PORT": "2", "NIM_MAX_MODEL_LEN": "3"}
    settings = read_settings(
        {"port": 10, "health_port": None, "max_model_len": None},
        {"port": 20, "health_port": 20},
        environment,
    )
    assert (settings.front.port, settings.front.health_port) == (10, 20)
    assert settings.model.max_model_len == 3


def test_keys_come_from_the_environment_or_a_file(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("first\n\n second \n", encoding="utf-8-sig")  # with a byte order mark
    assert from_environment(CANVASRT_API_KEYS="a, b,").front.keys == ("a", "b")
    settings = from_environment(CANVASRT_API_KEYS_FILE=str(file))
    assert settings.front.keys == ("first", "second")
    assert "first" not in repr(settings)


def test_keys_that_are_set_and_empty_do_not_open_the_door(tmp_path: Path):
    (tmp_path / "empty").touch()
    for variables in (
        {"CANVASRT_API_KEYS": " , "},
        {"CANVASRT_API_KEYS_FILE": str(tmp_path / "empty")},
        {"CANVASRT_API_KEYS_FILE": str(tmp_path / "missing")},
    ):
        with pytest.raises(CanvasError):
            from_environment(**variables)
    with pytest.raises(
        UsageError, match="CANVASRT_API_KEYS and CANVASRT_API_KEYS_FILE are both set"
    ):
        from_environment(CANVASRT_API_KEYS_FILE="keys", CANVASRT_API_KEYS="a")


def test_tls_takes_its_files():
    given: dict[str, Any] = {"ssl_cert": Path("c"), "ssl_key": Path("k"), "ssl_ca": Path("a")}
    assert read_settings({}, {}, {}).tls is None
    assert read_settings({**given, "ssl_mode": "disabled"}, {}, {}).tls is None
    tls = read_settings({**given, "ssl_mode": "tls"}, {}, {}).tls
    assert tls == {"certificate": "c", "key": "k"}
    assert read_settings({**given, "ssl_mode": "mtls"}, {}, {}).tls == {**tls, "ca": "a"}


def test_a_dry_run_shows_what_was_decided(command: Command, engines: Bundle):
    environment = {
        "NIM_MODEL_PATH": str(engines.path),
        "NIM_SERVER_PORT": "9000",
        "NIM_HEALTH_PORT": "9001",
        "NIM_PASSTHROUGH_ARGS": "--health-port 9002 --served-model-name 'a,b' --log-level debug",
        "CANVASRT_API_KEYS": "sesame",
    }
    done = command("serve", "--dry-run", "--json", "--grpc-port", "0", env=environment)
    data = json.loads(done.stdout)
    assert data["bundle"] == str(engines.path)
    assert data["ports"]["api"] == 9000
    assert data["ports"]["health"] == 9002
    assert data["ports"]["triton_grpc"] == 0
    assert data["served_model_names"] == ["a", "b"]
    assert data["log_level"] == "debug".upper()
    assert data["api_keys"] == 1
    assert data["profile"]["name"] == "onnxruntime-fp32-tp1-pp1"
    assert "sesame" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--port x", "NIM_PASSTHROUGH_ARGS"),
        ("--nothing", "No such option"),
        ("'", "No closing quotation"),
    ],
)
def test_passthrough_arguments_that_are_wrong_end_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    says: str,
):
    monkeypatch.setenv("NIM_PASSTHROUGH_ARGS", arguments)
    assert run(["serve", "engines", "--dry-run"]) == 2
    assert says in capsys.readouterr().err


def test_an_image_keeps_compiled_kernels_in_its_volume(
    engines: Bundle, monkeypatch: pytest.MonkeyPatch
):
    """Kernels are not stored below /tmp, which is small and is removed with the container."""
    image = settings_for([engines.manifest])
    settings = read_settings({}, {}, image.environment)
    server = Server(engines.path, settings)
    environment = image.environment | server._environment(find_installation(), Path("scratch"))
    for name in ("CANVASRT_CACHE", "HOME"):
        monkeypatch.setenv(name, environment[name])
    assert _compiled_kernels(engines.manifest, "a GPU").is_relative_to(CACHE)


def test_kernels_that_the_driver_compiles_are_kept_there_too(engines: Bundle):
    """By default, the driver would store up to 1 GiB below HOME, which is in a /tmp of 256 MiB."""
    target = {"name": "h100", "backend": "tensorrt", "builder_version": "11.1.0.106"}
    image = settings_for([Manifest({**engines.manifest.data, "target": target})])
    assert Path(image.environment["CUDA_CACHE_PATH"]).parent == Path(CACHE)


def test_shared_passes_and_the_log_s_level_reach_the_model(
    engines: Bundle, monkeypatch: pytest.MonkeyPatch
):
    assert from_environment().model.share_passes == "auto"
    with pytest.raises(UsageError, match="--share-passes is 'perhaps'"):
        read_settings({"share_passes": "perhaps"}, {}, {})
    settings = read_settings({"share_passes": "on"}, {}, {})
    server = Server(engines.path, settings, gpus=("GPU-b", "GPU-a"))
    # The effect of `--log-level error`.
    monkeypatch.setattr(logging.root, "level", logging.ERROR)
    monkeypatch.setattr(logging.root, "handlers", [logging.NullHandler()])
    environment = server._environment(find_installation(), Path("scratch"))
    # The process with the engines sees only these GPUs.
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert environment["CANVASRT_GPUS"] == "2"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # Triton's module, which exists only in processes of models.
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", MagicMock())
    backend = importlib.import_module("canvasrt.containers.triton.backend")
    load = MagicMock(side_effect=InterruptedError)
    monkeypatch.setattr(backend, "open_model", load)
    configure = MagicMock()
    monkeypatch.setattr(backend, "configure", configure)
    config = json.dumps({"parameters": {"engines": {"string_value": "engines"}}})
    with pytest.raises(InterruptedError):
        backend.StreamModel().initialize({"model_config": config, "model_repository": "m/n"})
    assert load.call_args.kwargs["share_passes"] is True
    assert configure.call_args.args == (logging.ERROR,)
    sys.modules.pop("canvasrt.containers.triton.backend")


def test_options_survive_the_environment_and_json() -> None:
    options = ModelOptions(threads=3, max_model_len=64, share_passes="on")
    assert ModelOptions.from_environment(options.to_environment()) == options
    assert ModelOptions.from_environment({}) == ModelOptions()
    for value in ("many", "1.5", '"3"'):
        with pytest.raises(CanvasError, match="CANVASRT_THREADS"):
            ModelOptions.from_environment({"CANVASRT_THREADS": value})
    front = FrontOptions(names=("a", "b"), keys=("k",))
    data = {each.name: getattr(front, each.name) for each in fields(front)}
    data |= {"names": ["a", "b"], "keys": ["k"]}
    assert FrontOptions.from_json(data) == front
