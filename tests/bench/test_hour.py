"""`bench hour`: results of finished steps are kept, and a step that was cut off runs again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import floor, hour
from bench.__main__ import MEASUREMENTS, main
from canvasrt.containers.processes import is_running
from canvasrt.errors import CanvasError


def test_a_cut_keeps_what_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = "import sys; open(sys.argv[1], 'a').write('x'); print('said')"
    steps = {
        "first": ((sys.executable, "-c", write, "{out}"), 1),
        "fails": ((sys.executable, "-c", "print('why'); raise SystemExit(3)"), 1),
        "cut": ((sys.executable, "-c", "raise KeyboardInterrupt"), 1),
        "slow": ((sys.executable, "-c", "import time; time.sleep(600)"), 0.001),
    }
    monkeypatch.setattr(hour, "STEPS", steps)
    run = hour._run

    def cut(*given: object) -> str:
        if given[3] == "cut":
            raise KeyboardInterrupt
        return run(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(hour, "_run", cut)
    with pytest.raises(KeyboardInterrupt):
        hour.measure(tmp_path, tmp_path, "first,fails,cut,slow")
    assert set(json.loads((tmp_path / "hour.json").read_text())) == {"first", "fails"}
    monkeypatch.setattr(hour, "_run", run)
    hour.measure(tmp_path, tmp_path, "first,fails,cut,slow")
    ended = {
        name: each["how"] for name, each in json.loads((tmp_path / "hour.json").read_text()).items()
    }
    assert ended["first"] == "done"
    assert ended["fails"] == "failed: exit code 3: why"
    assert ended["slow"].startswith("cut off")
    assert (tmp_path / "first.json").read_text() == "x"  # the step ran once
    assert "said" in (tmp_path / "first.log").read_text()


def test_a_start_ends_in_time_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of a start may use all of its time. A later step begins only if its whole time limit is left."""
    slow = ("sh", "-c", "echo began; printf x >> $0; sleep 600", "{out}")
    steps = {
        "slow": (slow, 20),
        "long": ((sys.executable, "-c", "pass"), 20),
        "quick": ((sys.executable, "-c", "pass"), 1),
    }
    monkeypatch.setattr(hour, "STEPS", steps)

    def started(minutes: float) -> dict[str, str]:
        hour.measure(tmp_path, tmp_path, "slow,long,quick", minutes)
        said = json.loads((tmp_path / "hour.json").read_text())
        return {name: each["how"] for name, each in said.items()}

    assert started(0.03) == {"slow": "goes on at the next start"}
    steps["slow"] = (slow, 0.03)
    cut = {"slow": "cut off after 0.03 minutes", "quick": "done"}
    assert started(9) == cut
    assert started(9) == cut | {"long": "done"}
    assert (tmp_path / "slow.log").read_text().count("began") == 2
    # The results of both tries are kept.
    assert [(tmp_path / f"slow{n}.json").read_text() for n in (".0", "")] == ["x", "x"]


def test_what_failed_runs_again_after_what_never_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed step may have lacked a package that has been installed in the meantime."""
    here = tmp_path / "installed"
    fails = (sys.executable, "-c", f"import pathlib; pathlib.Path({str(here)!r}).read_text()")
    quick = (sys.executable, "-c", "pass")
    monkeypatch.setattr(hour, "STEPS", {"fails": (fails, 1), "quick": (quick, 1)})
    hour.measure(tmp_path, tmp_path, "fails")
    here.touch()
    capsys.readouterr()
    hour.measure(tmp_path, tmp_path, "fails,quick")
    assert [line for line in capsys.readouterr().out.splitlines() if "done" in line] == [
        "quick: done",
        "fails: done",
    ]


@pytest.mark.parametrize("damaged", ["", '{"quick": {"how'])
def test_a_damaged_state_repeats_steps(
    damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is damaged if the machine loses power or is taken away during a write."""
    monkeypatch.setattr(hour, "STEPS", {"quick": ((sys.executable, "-c", "pass"), 1)})
    (tmp_path / "hour.json").write_text(damaged)
    hour.measure(tmp_path, tmp_path, "quick")
    assert json.loads((tmp_path / "hour.json").read_text())["quick"]["how"] == "done"


def test_what_lacks_a_package_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pytest succeeds if tests are skipped for want of a package; the step must fail."""
    skips = "print('1 passed, 1 skipped in 0.02s')"
    monkeypatch.setattr(hour, "STEPS", {"parity": ((sys.executable, "-c", skips), 1)})
    hour.measure(tmp_path, tmp_path, "parity")
    assert "parity: failed: exit code 0: 1 passed, 1 skipped" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CanvasError, match="torch is not installed"):
        floor.measure(out=tmp_path / "rates.json")


def test_what_a_step_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps start child processes, such as builders. A survivor could keep the GPU busy during the next step."""
    file = tmp_path / "child"
    command = ("sh", "-c", "sleep 600 & echo $! > $0; wait", str(file))
    monkeypatch.setattr(hour, "STEPS", {"slow": (command, 0.03)})
    hour.measure(tmp_path, tmp_path, "slow")
    assert not is_running(int(file.read_text()))


def test_quantized_engines_are_measured_and_their_kernels_read() -> None:
    words = [" ".join(command) for command, _ in hour.STEPS.values()]
    for each in ("int4", "fp8"):
        assert any(f"--sides tensorrt --precision {each}" in line for line in words)
    names = list(hour.STEPS)
    assert names.index("kernels-fp8") > names.index("gpu-fp8")


def test_its_steps_are_measurements_that_there_are() -> None:
    for command, _ in hour.STEPS.values():
        if "bench" in command:
            assert command[3] in MEASUREMENTS
            assert main([*command[3:], "--help"]) == 0  # fails if an option does not exist
    assert main(["hour", "--help"]) == 0
    assert main(["hour", "--steps", "doctor,prob"]) == 1
    files = (hour.ROOT / "tests" / "runtime").rglob("test_*.py")
    assert sum(each.read_text().count(f"def test_{hour.ON_A_GPU}") for each in files) == 2
