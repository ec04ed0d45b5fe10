"""Kills and stops random processes of a server while clients ask: no wrong answer, and an end or a
recovery within seconds.

python -m tests.faults.kills --times 100
"""

from __future__ import annotations

import http.client
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults import attack
from tests.helpers.serving_process import ANY_PORTS, Serving, command_lines, serving

CLIENTS = 16
SECONDS = 30.0  # to recover or to end
WHO = ("supervisor", "triton", "stream model", "answer model", "front end", "guard", "trials")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
# For how long a service is watched that goes on, by what was done.
_WATCHED = {signal.SIGKILL: 8, signal.SIGTERM: 8, signal.SIGSTOP: 15}
# What the exit codes of a service may be, by what was done.
_ENDS = {signal.SIGKILL: {1}, signal.SIGTERM: {1}, signal.SIGSTOP: {4}}


class Clients:
    """Ask all the time, and compare every answer with the one that was given to it alone."""

    def __init__(self, host: str, known: dict[str, str], count: int = CLIENTS) -> None:
        self.right = 0
        self.failed = Counter[str]()  # by status, or by what was raised
        self.wrong: list[str] = []
        self._host, self._known = host, known
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._done.is_set():
            question = draw.choice(attack.QUESTIONS)
            try:
                status, body = attack.ask(self._host, question, timeout=SECONDS)
            except (OSError, http.client.HTTPException, ValueError) as error:
                with self._lock:
                    self.failed[type(error).__name__] += 1
                self._done.wait(0.05)
                continue
            with self._lock:
                if status != 200:
                    self.failed[str(status)] += 1
                elif attack.text_of(body) == self._known[question]:
                    self.right += 1
                else:
                    self.wrong.append(f"{question}: {attack.text_of(body)!r}")
            if status != 200:
                self._done.wait(0.05)

    def stop(self) -> None:
        """Wait for the last answers."""
        self._done.set()
        for thread in self._threads:
            thread.join(2 * SECONDS)
        self.wrong += [f"{thread.name} hangs" for thread in self._threads if thread.is_alive()]


def processes(running: Serving) -> dict[str, int]:
    """Return the process ids of a service, by what they are."""
    own = running.process.pid
    found = {"supervisor": own, "triton": running.said["pid"]}
    marks = {
        "stream model": "/canvasrt_stream/1/model.py",
        "answer model": "/canvasrt/1/model.py",
        "guard": "canvasrt.containers.serve.guard",
        "front end": "canvasrt.containers.openai",
        "trials": "canvasrt.containers.triton.trial_process",
    }
    for pid, line in command_lines().items():
        for name, mark in marks.items():
            if mark in line and (f"-{own}-" in line or own in ancestors(int(pid))):
                found[name] = int(pid)
    return found


def ancestors(pid: int) -> list[int]:
    """Return a process's parent, its parent, and so on."""
    found = []
    while pid := parent_of(pid):
        found.append(pid)
    return found


def parent_of(pid: int) -> int:
    """Return a process's parent; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def strike(running: Serving, who: str, number: signal.Signals, clients: Clients) -> str:
    """Send a signal; return what came of it: `recovered in`, `ended with`, or what was wrong."""
    begin = time.monotonic()
    while who not in (found := processes(running)):  # a front end that is being replaced
        time.sleep(0.1)
        if time.monotonic() - begin > SECONDS:
            return f"WRONG: there is no {who}"
    os.kill(found[who], number)
    begin = time.monotonic()
    if (who, number) == ("supervisor", signal.SIGSTOP):
        time.sleep(1)
        os.kill(running.process.pid, signal.SIGCONT)
    goal, watched = clients.right + 2 * CLIENTS, time.monotonic() + _WATCHED[number]
    while time.monotonic() - begin < SECONDS:
        if running.process.poll() is not None:
            code = running.process.returncode
            allowed = _ENDS[number]
            if who == "supervisor":
                allowed = {0} if number == signal.SIGTERM else {-number}
            return f"ended with {code}" if code in allowed else f"WRONG: ended with {code}"
        # A process that is stopped is noticed after five seconds, and a service takes a few to end.
        if clients.right >= goal and time.monotonic() > watched:
            return "went on"
        time.sleep(0.02)
    return f"WRONG: neither ended nor answered within {SECONDS:g} s"


def follow(host: str, regex: str) -> str:
    """Ask for an answer of a grammar that is new; return what came of it."""
    form = {"type": "regex", "regex": regex}
    status, body = attack.ask(host, "a", max_tokens=200, response_format=form)
    if status == 200 and re.fullmatch(regex, attack.text_of(body)):
        return "went on"
    return f"WRONG: {status} for {regex}: {body}"


def left_behind(running: Serving) -> list[str]:
    """Return what a service left 15 seconds after its end: processes, memory, files and ports."""
    ports = [running.said["http"], running.said["grpc"], attack.host_of(running)]
    deadline = time.monotonic() + 15
    while True:
        found = running.stale() + running.scratch()
        found += [f"port {each}" for each in ports if is_open(each)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def is_open(address: str) -> bool:
    """Return whether something listens on host:port."""
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def run(package: Path, folder: Path, times: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Strike `times` times; return the outcomes, and what was wrong."""
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
            host = attack.host_of(running)
            known = attack.known_answers(host)
            clients = Clients(host, known)
            while clients.right < CLIENTS:
                time.sleep(0.02)
            while plan and running.process.poll() is None:
                who, number = plan.pop(0)
                outcome = strike(running, who, number, clients)
                if who == "trials" and outcome == "went on":
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


def main() -> int:
    """Run as a program; return the exit code."""
    given = attack.arguments(__doc__ or "", times=100, seed=1)
    with attack.workspace(given.package) as (package, folder):
        outcomes, wrong = run(package, folder, given.times, given.seed)
    return attack.report(outcomes, wrong)


if __name__ == "__main__":
    sys.exit(main())
