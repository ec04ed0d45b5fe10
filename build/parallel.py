"""Runs tasks in parallel within a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class ParallelTask(Generic[ResultT]):
    """A task for a thread. It takes `memory` bytes."""

    name: str
    memory: int
    run: Callable[[], ResultT]


def run_all(
    tasks: Sequence[ParallelTask[ResultT]],
    memory: int,
    workers: int,
    started: Callable[[str], None],
    finished: Callable[[str], None],
    stop: Callable[[], None],
) -> dict[str, ResultT]:
    """Run all tasks and return their results by name.

    Concurrent tasks take at most `memory` bytes together; a task that needs more runs alone. `started` and `finished`
    are called on this thread with the task's name. If a task fails or this thread is interrupted, `stop` is called and
    must end all running tasks. Then the first failure is raised.
    """
    waiting, results = list(tasks), {}
    running: dict[Future[ResultT], ParallelTask[ResultT]] = {}
    with ThreadPoolExecutor(max(1, workers), "canvasrt-build") as pool:
        try:
            while waiting or running:
                used = sum(task.memory for task in running.values())
                for task in list(waiting):
                    if running and (used + task.memory > memory or len(running) >= workers):
                        continue
                    started(task.name)
                    running[pool.submit(task.run)] = task
                    used += task.memory
                    waiting.remove(task)
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    task = running.pop(future)
                    results[task.name] = future.result()
                    finished(task.name)
        except BaseException:
            stop()
            raise
    return {task.name: results[task.name] for task in tasks}
