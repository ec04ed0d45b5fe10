"""A build that is killed while it calibrates or quantizes is continued by the next, and the result is identical."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from canvasrt.bundle import load_bundle
from canvasrt.calibration_prompts import CALIBRATED
from tests.helpers import library

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1200)]

# This build saves every sweep.
BUILD = """
import sys
from canvasrt.cli.app import run
from canvasrt.export.quantize import saved_sweeps
saved_sweeps.SAVE_EVERY = 0
sys.exit(run(["build", "demo", "-t", "cpu", "-p", "nvfp4-mixed", *sys.argv[1:]]))
"""


def state_of(cache: Path) -> tuple[int, ...]:
    """Return the modification time of the last saved sweep, which identifies it."""
    try:
        return tuple(
            each.stat().st_mtime_ns for each in cache.glob("calibrations/*/sweeps/state.pt")
        )
    except FileNotFoundError:
        return ()


def has(pattern: str) -> Callable[[Path, tuple[int, ...]], bool]:
    return lambda cache, before: any(cache.glob(pattern))


# When each start of the build is killed. A "later sweep" is one that the same start has saved.
PLACES: dict[str, Callable[[Path, tuple[int, ...]], bool]] = {
    "first sweep": lambda cache, before: bool(state_of(cache)),
    "later sweep": lambda cache, before: state_of(cache) not in ((), before),
    "all sweeps": has("calibrations/*/calibrated.json"),
    "first graph": has("quantizations/*/body_0/*.bin"),
    "all graphs": has("graphs/*/manifest.json"),
}


def start(cache: Path, out: Path, prompts: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, "--calibration", str(prompts), "-o", str(out)],
        env={**os.environ, "CANVASRT_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_five_kills_change_no_byte(prompts: Path, tmp_path: Path) -> None:
    whole_cache, cache = (library.empty_cache(tmp_path / each) for each in ("whole-cache", "cache"))
    whole = start(whole_cache, tmp_path / "whole", prompts)
    said, _ = whole.communicate()
    assert whole.returncode == 0, said
    assert "calibrating for nvfp4-mixed: 2 prompts" in said
    out = tmp_path / "out"
    for place, is_there in PLACES.items():
        before = state_of(cache)
        build = start(cache, out, prompts)
        while build.poll() is None and not is_there(cache, before):
            time.sleep(0.002)
        build.send_signal(signal.SIGKILL)
        said, _ = build.communicate()
        assert build.returncode == -signal.SIGKILL, (place, said)
        assert not out.exists()
    last = start(cache, out, prompts)
    said, _ = last.communicate()
    assert last.returncode == 0, said
    assert load_bundle(out).manifest.digest == load_bundle(tmp_path / "whole").manifest.digest
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "cache",
        "out",
        "prompts.jsonl",
        "whole",
        "whole-cache",
    ]
    (left,) = (cache / "calibrations").glob("*/*")
    assert left.name == CALIBRATED


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of two prompts. They take a dozen sweeps."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "12+34="}\n{"prompt": "56-7="}\n')
    return file
