"""Makes the workers of pytest-xdist take the longest test files first, by the seconds in tests/durations.json.

At the end of a run, it prints how far apart the workers ended. If that is more than a minute, update the file: `pytest
--write-durations` measures all files of a run.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).parents[1] / "durations.json"
# A file has two durations: one of the tests that run by default, and one of the tests marked `acceptance`.
DEFAULT, ACCEPTANCE = "default", "acceptance"
# Assumed seconds of a test in a file that was never measured.
UNKNOWN = 1.0

_measured: dict[tuple[str, str], float] = defaultdict(float)
_ends: dict[str, float] = {}  # when each worker's last test ended


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-durations",
        action="store_true",
        help="write the measured seconds of whole files to tests/durations.json",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by duration, the longest first. Without workers, files stay sorted by name."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    table = json.loads(TABLE.read_text())
    counts = Counter((_file(item.nodeid), _kind(item.keywords)) for item in items)
    seconds: dict[str, float] = defaultdict(float)
    for (file, kind), count in counts.items():
        seconds[file] += table[kind].get(file, UNKNOWN * count)
    items.sort(key=lambda item: (-seconds[_file(item.nodeid)], _file(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker the next file, in the order above, when it has finished one."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _measured[_file(report.nodeid), _kind(report.keywords)] += report.duration
    if worker := getattr(report, "worker_id", None):
        _ends[worker] = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _ends:
        apart = max(_ends.values()) - min(_ends.values())
        terminalreporter.write_line(f"workers ended {apart:.0f} s apart")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--write-durations") or hasattr(session.config, "workerinput"):
        return
    table = json.loads(TABLE.read_text())
    for (file, kind), seconds in _measured.items():
        table[kind][file] = round(seconds, 1)
    for kind, files in table.items():
        there = (each for each in files.items() if (TABLE.parents[1] / each[0]).exists())
        table[kind] = dict(sorted(there))
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _kind(keywords: Any) -> str:
    return ACCEPTANCE if "acceptance" in keywords else DEFAULT
