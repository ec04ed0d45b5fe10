"""Random calls, random kills, and a soak test. By default, they are short enough for continuous integration: 300 calls,
6 signals, and 16 clients for 15 seconds. CANVASRT_FUZZ_CALLS, CANVASRT_SOAK_CLIENTS and CANVASRT_SOAK_SECONDS set
larger numbers."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from canvasrt.bundle import Bundle
from canvasrt.containers.processes import is_running
from tests.faults import fuzz
from tests.faults.attack import (
    CLIENTS,
    SECONDS,
    Clients,
    known_answers,
    left_behind,
    processes,
    text_of,
)
from tests.helpers.serving import eventually, needs_triton
from tests.helpers.serving_process import ANY_PORTS, Serving, chat, serving

pytestmark = [needs_triton, pytest.mark.acceptance]

WHO = (
    "supervisor",
    "triton",
    "stream model",
    "answer model",
    "front end",
    "guard",
    "grammar sandbox",
)
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
# Signal → how many seconds a surviving service is watched.
_WATCHED = {signal.SIGKILL: 8, signal.SIGTERM: 8, signal.SIGSTOP: 15}
# Signal → exit codes that the service may have.
_ENDS = {signal.SIGKILL: {1}, signal.SIGTERM: {1}, signal.SIGSTOP: {4}}


# By how much each figure may grow from the second third of the soak to the last third. The first third warms up.
_GROWTH = {"MB": 1.05, "threads": 1.0, "descriptors": 1.0}
_SLACK = {"MB": 8.0, "threads": 4.0, "descriptors": 16.0}


def measure(pid: int) -> dict[str, float]:
    """Return the memory, threads and descriptors of one process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "MB": int(fields["VmRSS"].split()[0]) / 1024,
        "threads": float(fields["Threads"]),
        "descriptors": float(len(list(Path(f"/proc/{pid}/fd").iterdir()))),
    }


def soak(package: Path, folder: Path, clients: int, seconds: int) -> list[str]:
    """Run clients for some time; describe wrong answers, failed requests, and figures that grew."""
    found: dict[str, list[float]] = defaultdict(list)
    with serving(package, folder, *ANY_PORTS) as running:
        host = running.host
        load = Clients(host, known_answers(host), clients)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert running.process.poll() is None, "the server has ended"
            for name, pid in processes(running).items():
                assert is_running(pid), f"the {name} has ended"
                for what, value in measure(pid).items():
                    found[f"{name}, {what}"].append(value)
            time.sleep(min(2.0, seconds / 30))
        load.stop()
        print(f"{load.right} right answers")  # shown by pytest -s
        wrong = list(load.wrong)
        if load.failed:
            wrong.append(f"requests failed: {dict(load.failed)}")
    for name, values in found.items():
        what = name.rpartition(", ")[2]
        if what in _GROWTH:
            third = len(values) // 3
            # Medians ignore peaks by clients that come and go.
            before, after = median(values[third : 2 * third]), median(values[2 * third :])
            if after > before * _GROWTH[what] + _SLACK[what]:
                wrong.append(f"{name} grew from {before:.0f} to {after:.0f}")
    return wrong


def strike(running: Serving, who: str, number: signal.Signals, clients: Clients) -> str:
    """Send a signal to a process of the service; return the outcome: `went on`, `ended with CODE`, or `WRONG: …`."""
    found = dict[str, int]()
    # The process may be missing while it is being replaced.
    if not eventually(lambda: found.update(processes(running)) or who in found, SECONDS):
        return f"WRONG: there is no {who}"
    os.kill(found[who], number)
    if (who, number) == ("supervisor", signal.SIGSTOP):
        time.sleep(1)
        os.kill(running.process.pid, signal.SIGCONT)
    goal, watched = clients.right + 2 * CLIENTS, time.monotonic() + _WATCHED[number]

    def goes_on() -> bool:
        # A stopped process is detected after five seconds, and the service takes some more to end.
        return clients.right >= goal and time.monotonic() > watched

    if not eventually(lambda: running.process.poll() is not None or goes_on(), SECONDS):
        return f"WRONG: neither ended nor answered within {SECONDS:g} s"
    if (code := running.process.poll()) is None:
        return "went on"
    allowed = _ENDS[number]
    if who == "supervisor":
        allowed = {0} if number == signal.SIGTERM else {-number}
    return f"ended with {code}" if code in allowed else f"WRONG: ended with {code}"


def follow(host: str, regex: str) -> str:
    """Ask for an answer that follows a new grammar; return the outcome."""
    form = {"type": "regex", "regex": regex}
    status, body, _ = chat(host, "a", max_tokens=200, response_format=form, seed=5)
    if status == 200 and re.fullmatch(regex, text_of(body)):
        return "went on"
    return f"WRONG: {status} for {regex}: {body}"


def kill(package: Path, folder: Path, times: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Kill or stop a random process `times` times. Return counts of outcomes, and descriptions of what was wrong."""
    draw, outcomes, wrong = random.Random(seed), Counter[str](), []
    choices = [(who, number) for who in WHO for number in SIGNALS]
    plan: list[Any] = []
    while len(plan) < times:
        plan += draw.sample(choices, len(choices))
    plan = plan[:times]
    answers = 0
    for life in range(times):
        if not plan:
            break
        place = folder / f"life-{life}"
        place.mkdir()
        with serving(package, place, *ANY_PORTS) as running:
            host = running.host
            clients = Clients(host, known_answers(host))
            assert eventually(lambda: clients.right >= CLIENTS)  # noqa: B023
            while plan and running.process.poll() is None:
                who, number = plan.pop(0)
                outcome = strike(running, who, number, clients)
                if who == "grammar sandbox" and outcome == "went on":
                    outcome = follow(host, f"[a-z]{{{len(plan) + 1}}}")
                outcomes[f"{number.name} {who}: {outcome}"] += 1
                if "WRONG" in outcome:
                    wrong.append(f"{number.name} {who}: {outcome}")
                    running.process.kill()
                    running.process.wait()
            clients.stop()
            answers += clients.right
            wrong += clients.wrong
        if left := left_behind(running):
            wrong.append(f"left behind: {left}")
    outcomes["right answers"] = answers
    return outcomes, wrong


def test_random_calls(packaged: Bundle, tmp_path: Path):
    calls = int(os.environ.get("CANVASRT_FUZZ_CALLS", 300))
    outcomes, wrong = fuzz.run(packaged.path, tmp_path, calls, seed=7)
    print(outcomes)  # shown by pytest -s
    assert not wrong
    assert outcomes["good, right"] == calls // fuzz.GOOD_EVERY
    assert min(outcomes[each] for each in ("http 200", "http 400", "grpc ok")) > 0, outcomes


def test_random_kills(packaged: Bundle, tmp_path: Path):
    """No answer is wrong, and after every signal the service continues or ends."""
    outcomes, wrong = kill(packaged.path, tmp_path, times=6, seed=3)
    assert not wrong
    assert sum(outcomes.values()) - outcomes["right answers"] == 6


def test_nothing_grows(packaged: Bundle, tmp_path: Path):
    """Checks memory, threads and descriptors of every process while many clients ask."""
    clients = int(os.environ.get("CANVASRT_SOAK_CLIENTS", 16))
    seconds = int(os.environ.get("CANVASRT_SOAK_SECONDS", 15))
    assert not soak(packaged.path, tmp_path, clients, seconds)
