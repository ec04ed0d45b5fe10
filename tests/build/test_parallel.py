"""Parallel tasks: as many as memory allows, and none left behind."""

from __future__ import annotations

import threading
import time

import pytest

from canvasrt.build.compile import Children
from canvasrt.build.parallel import ParallelTask, run_all
from canvasrt.errors import CanvasError


class Load:
    """The memory of the running tasks, and its peak."""

    def __init__(self) -> None:
        self.now, self.most, self.lock = 0, 0, threading.Lock()

    def task(self, name: str, memory: int, seconds: float = 0.05) -> ParallelTask[str]:
        def run() -> str:
            with self.lock:
                self.now += memory
                self.most = max(self.most, self.now)
            time.sleep(seconds)
            with self.lock:
                self.now -= memory
            return name.upper()

        return ParallelTask(name, memory, run)


def run(
    tasks: list[ParallelTask[str]], memory: int, workers: int = 8
) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    results = run_all(
        tasks,
        memory,
        workers,
        started=lambda name: said.append(f"+{name}"),
        finished=lambda name: said.append(f"-{name}"),
        stop=lambda: said.append("stop"),
    )
    return results, said


def test_memory_is_never_exceeded_and_all_are_done() -> None:
    load = Load()
    results, said = run([load.task(name, 3) for name in "abcdefg"], memory=7)
    assert results == {name: name.upper() for name in "abcdefg"}
    assert load.most == 6
    assert sorted(said) == sorted(f"{sign}{name}" for name in "abcdefg" for sign in "+-")


def test_one_that_takes_more_runs_alone() -> None:
    load = Load()
    run([load.task("large", 9), load.task("small", 1), load.task("other", 1)], memory=7)
    assert load.most == 9


def test_no_more_than_there_are_workers() -> None:
    load = Load()
    run([load.task(name, 1) for name in "abcd"], memory=100, workers=2)
    assert load.most == 2


def test_a_failure_stops_the_others_and_is_raised() -> None:
    def fail() -> str:
        raise CanvasError("no engine was built")

    load, stopped = Load(), threading.Event()
    waits = ParallelTask("waits", 1, lambda: str(stopped.wait(10)))
    with pytest.raises(CanvasError, match="no engine"):
        run_all(
            [waits, ParallelTask("fails", 1, fail), load.task("never", 100)],
            2,
            8,
            started=lambda name: None,
            finished=lambda name: None,
            stop=stopped.set,
        )
    assert load.most == 0


def test_killed_children_end_and_none_follow() -> None:
    children = Children()
    process = children.start(["sleep", "60"])
    children.kill()
    assert process.wait(5) == -9
    children.end(process)
    with pytest.raises(CanvasError, match="stopped"):
        children.start(["sleep", "60"])
