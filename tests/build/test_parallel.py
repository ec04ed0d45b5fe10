"""Parallel tasks: as many run as memory allows, and all are done."""

from __future__ import annotations

import threading
import time

import pytest

from canvasrt.build.compile import Children
from canvasrt.build.parallel import ParallelTask, run_all
from canvasrt.errors import CanvasError


class Load:
    """Counts the memory of the running tasks, and its peak. Tasks run until the peak is `wanted`."""

    def __init__(self, wanted: int = 0) -> None:
        self.now, self.most, self.wanted = 0, 0, wanted
        self.changed = threading.Condition()

    def task(self, name: str, memory: int) -> ParallelTask[str]:
        def run() -> str:
            with self.changed:
                self.now += memory
                self.most = max(self.most, self.now)
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.most >= self.wanted, 60)
            time.sleep(0.05)  # in which one too many would begin
            with self.changed:
                self.now -= memory
            return name.upper()

        return ParallelTask(name, memory, run)


@pytest.mark.parametrize(
    ("memory", "limit", "workers", "most"),
    [
        ([3] * 7, 7, 8, 6),
        ([9, 1, 1], 7, 8, 9),  # a task that exceeds the limit runs alone
        ([1] * 4, 100, 2, 2),
    ],
)
def test_tasks_stay_within_the_limits_and_all_are_done(
    memory: list[int], limit: int, workers: int, most: int
) -> None:
    load, said = Load(most), list[str]()
    names = "abcdefg"[: len(memory)]
    results = run_all(
        [load.task(name, each) for name, each in zip(names, memory, strict=True)],
        limit,
        workers,
        started=lambda name: said.append(f"+{name}"),
        finished=lambda name: said.append(f"-{name}"),
        stop=lambda: said.append("stop"),
    )
    assert results == {name: name.upper() for name in names}
    assert load.most == most
    assert sorted(said) == sorted(f"{sign}{name}" for name in names for sign in "+-")


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
    assert process.wait(60) == -9
    children.end(process)
    with pytest.raises(CanvasError, match="stopped"):
        children.start(["sleep", "60"])
