"""Work side by side, as far as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Task(Generic[Result]):
    """Something to be done, in a thread of its own, and the bytes of memory that it takes meanwhile."""

    name: str
    memory: int
    run: Callable[[], Result]


def run_all(
    tasks: Sequence[Task[Result]],
    memory: int,
    workers: int,
    started: Callable[[str], None],
    finished: Callable[[str], None],
    stop: Callable[[], None],
) -> dict[str, Result]:
    """Results by name. Together tasks take at most `memory`; one that takes more runs alone.

    `started` and `finished` are told each name, in this thread. When a task fails, or this thread is interrupted, `stop` is called,
    which should make the others end soon; the first failure is raised.
    """
    waiting, results = list(tasks), {}
    running: dict[Future[Result], Task[Result]] = {}
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
