"""The command line: help, exit codes, and one `error:` and one `hint:` line for every failure."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from canvasrt import __version__
from canvasrt.cli import app, doctor
from canvasrt.cli.app import COMMANDS, parsed_command
from canvasrt.console import size
from canvasrt.targets import TARGETS
from tests.canvasrt.cli.conftest import Ask, fails
from tests.conftest import Command
from tests.helpers import library
from tests.helpers.bundles import make
from tests.helpers.serving import eventually

HEAVY = (
    "fastapi",
    "http.client",
    "numpy",
    "onnx",
    "onnxruntime",
    "tokenizers",
    "torch",
    "transformers",
    "tritonclient",
)
CANVASRT = (sys.executable, "-m", "canvasrt")


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("assert run([]) == 0", HEAVY),
        ("assert run(['build', '--help']) == 0", HEAVY),
        ("import canvasrt.pipeline", ("jinja2", "tokenizers")),  # a build of an existing bundle
    ],
)
def test_what_is_quick_loads_nothing_heavy(code: str, heavy: tuple[str, ...]) -> None:
    code = f"""
import sys
from canvasrt.cli.app import run
{code}
print({{*{heavy!r}}} & sys.modules.keys(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "set()\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_argument_and_option_explains_itself(name: str) -> None:
    found = parsed_command(name)
    assert first_line(found.help).endswith(".")
    for parameter in found.params:
        text = first_line(parameter.help)
        assert len(text) > 4, f"{name} {parameter.opts}"
        assert text.endswith("."), f"{name} {parameter.opts}: {text}"


def first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("export nowhere -o out", "no checkpoint at nowhere"),
        ("export some/model -o out", "some/model is not a folder here"),
        ("export demo -o /", "/ is not empty"),
        ("build demo -t cpu -o /", "/ is not empty"),
        ("export demo -o ~no-one/out", "a path begins with ~, but"),
        ("build nowhere -t cpu -o out", "no checkpoint at nowhere"),
        ("build demo -t h200 -o out", "engines for h200 can only be built on its GPU"),
        ("inspect nowhere", "no bundle at nowhere"),
        ("inspect .", r"no manifest\.json"),
        ("verify nowhere", "no bundle at nowhere"),
    ],
)
def test_failures_exit_with_1(line: str, said: str, here: Command, tmp_path: Path) -> None:
    fails(here(*line.split(), cwd=tmp_path), said)
    assert list(tmp_path.iterdir()) == []


def test_inspect_and_verify(here: Command, ask: Ask, tmp_path: Path) -> None:
    bundle = make(tmp_path / "[bold]")  # text in brackets must not be taken for markup
    shown = ask("inspect", bundle.path)
    assert bundle.manifest.digest in shown
    assert "embedding.bin" in shown
    assert re.search(r"^vision +none$", shown, re.M)
    assert json.loads(ask("inspect", bundle.path, "--json")) == bundle.manifest.data
    assert "[bold]: " in ask("verify", bundle.path)
    checked = json.loads(ask("verify", bundle.path, "--json"))
    assert (checked["ok"], checked["files"]) == (True, len(bundle.manifest.files))
    bundle.file("embedding.bin").write_bytes(bytes(2048))
    fails(here("verify", bundle.path), r"embedding\.bin differs")
    with_manifest = bundle.path / "manifest.json"
    with_manifest.write_text(with_manifest.read_text().replace("graphs", "grapes"))
    fails(here("inspect", bundle.path), "digest disagrees")


def test_help_and_targets_cut_no_word_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(columns: str, *arguments: str) -> str:
        monkeypatch.setenv("COLUMNS", columns)
        assert app.run([*arguments]) == 0
        return capsys.readouterr().out

    help = shown("80", "serve", "--help")
    assert "…" not in help
    assert {"--served-model-name", "CANVASRT_ALLOWED_HOSTS."} <= set(help.split())
    targets = shown("80", "targets")
    assert max(map(len, targets.splitlines())) <= 80
    assert "  int4 fp8 bf16  " in targets
    assert len(targets.splitlines()) == len(TARGETS) + 1  # one line per target, and a header
    assert set(targets.split()) <= set(shown("60", "targets").split())


def test_a_tower_that_was_never_trained_is_said_to_be_unused(ask: Ask) -> None:
    unused = "1-layer tower, hidden 16; unused: the chat template takes no images"
    for checkpoint, said in (("demo", unused), ("demo-vision", "2-layer tower, hidden 32")):
        shown = ask("inspect", library.bundle(checkpoint))
        assert re.search(rf"^vision +{said}$", shown, re.M)


def test_targets_and_doctor_as_data(ask: Ask) -> None:
    rows = json.loads(ask("targets", "--json"))
    assert (rows[0]["name"], rows[0]["builds_here"]) == ("cpu", True)
    report = json.loads(ask("doctor", "--json"))
    assert report["machine"]["processors"] >= 1
    assert report["machine"]["memory"] > 2**28
    gaps = [check for check in report["checks"] if check["state"] == "gap"]
    assert all(check["fix"] for check in gaps)
    assert report["gaps"] == len(gaps)


@pytest.mark.parametrize(
    ("memory", "state", "words"),
    [
        (32, "ok", r"32\.0 GB; the released model takes 1\d\.\d GB"),
        (16, "info", "16.0 GB, too little"),
    ],
)
def test_doctor_says_whether_the_released_model_runs_here(
    monkeypatch: pytest.MonkeyPatch, memory: int, state: str, words: str
) -> None:
    monkeypatch.setattr("canvasrt.machine.memory_bytes", lambda: memory * 10**9)
    check = doctor._memory()
    assert check.state == state
    assert re.search(words, check.found)
    assert check.found.endswith("on a CPU, in int4")


def test_cuda_numbers_gpus_as_nvidia_smi_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in CUDA_VISIBLE_DEVICES then mean the same as in nvidia-smi."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # monkeypatch then restores it
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    assert app.run(["--version"]) == 0
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_dry_run_prints_the_plan_and_writes_nothing(ask: Ask, checkpoint_files: Path) -> None:
    out = checkpoint_files.parent / "out"
    arguments = ("build", checkpoint_files, "-t", "cpu,rtx-5090", "-o", out, "--dry-run")
    rows = json.loads(ask(*arguments, "--json"))
    assert [row["out"] for row in rows] == [str(out / "cpu"), str(out / "rtx-5090")]
    assert [row["memory"]["contexts_on_host"] > 0 for row in rows] == [False, True]
    text = ask(*arguments)
    assert re.findall(r"contexts .*, and \S+ MB on the host", text)
    assert "runs on    this machine" in text
    assert all(f"{size(row['needs']['disk'])} at the peak" in text for row in rows)
    assert "runs on    GeForce RTX 5090, 32.0 GB: fits" in text
    assert not out.exists()
    (row,) = json.loads(ask("build", checkpoint_files, "-t", "cpu", "--dry-run", "--json"))
    assert row["out"] == "engines"


def test_build_again_says_that_it_is_up_to_date(ask: Ask, tmp_path: Path) -> None:
    arguments = ("build", "demo", "-t", "cpu", "-o", tmp_path / "out")
    assert "built" in ask(*arguments)
    assert "up to date" in ask(*arguments)


def test_the_traceback_is_for_those_who_ask(command: Command, tmp_path: Path) -> None:
    assert app._take_debug(["--debug", "inspect", "x"]) == (["inspect", "x"], True)
    assert app._take_debug(["inspect", "x", "--", "--debug"])[1] is False
    done = command("inspect", tmp_path, "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr.partition("error:")[0]


def test_a_bug_is_shown_as_one(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise KeyError("oh")

    monkeypatch.setattr("canvasrt.bundle.load_bundle", broken)
    assert "--debug" in fails(here("inspect", "somewhere"), "KeyError: 'oh'")


@pytest.mark.acceptance
def test_a_build_that_is_told_to_stop_leaves_nothing(tmp_path: Path) -> None:
    """The signal arrives during the export, the longest part of a build. test_demo.py interrupts the demo."""
    process = subprocess.Popen(
        [*CANVASRT, "build", "demo", "-t", "cpu", "-o", tmp_path / "out"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CANVASRT_CACHE": str(tmp_path / "cache")},
    )
    assert eventually(lambda: bool(list(tmp_path.glob("cache/graphs/.*.partial-*/*"))))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert "Traceback" not in said
    left = [path for path in tmp_path.rglob("*") if path.is_file() or "partial" in path.name]
    # Only complete traced layers stay in the cache, for the next build.
    assert {path.parent.name for path in left if path.suffix != ".lock"} <= {"traces"}
    assert not (tmp_path / "out").exists()


@pytest.mark.acceptance
def test_a_full_disk_is_said_in_two_lines(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *CANVASRT]
        + ["export", "demo", "-o", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path.parent)},
    )
    fails(done, "no space left")
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m canvasrt targets | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("stream", "line", "code"),
    [("stdin", "generate b -", 1), ("stdout", "targets --json", 0), ("stderr", "verify b", 1)],
)
def test_closed_streams_are_empty(
    stream: str, line: str, code: int, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, stream, None)
    done = here(*line.split())
    assert done.returncode == code, done.stderr
    assert "bug" not in done.stderr


def test_a_terminal_that_is_not_utf_8_gets_what_it_can_show() -> None:
    code = (
        "from canvasrt.cli.app import run; from canvasrt.console import emit, emit_line;"
        " run(['--version']); emit(0, lambda shown: shown.print('a → b')); emit_line('a → b')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    shown = [f"canvasrt {__version__}", "a ? b", '"a \\u2192 b"']
    assert done.stdout.splitlines() == shown, done.stderr
