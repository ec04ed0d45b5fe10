"""Answers requests on a Ray cluster. Every actor opens the bundle; if an actor dies, others take over its requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from canvasrt.bundle import load_bundle
from canvasrt.containers.batch.lines import Line
from canvasrt.containers.batch.local import Local
from canvasrt.containers.batch.run import Reply
from canvasrt.errors import CanvasError, EngineError
from canvasrt.extras import require


class Cluster:
    """One actor per machine of a cluster; for GPU engines, one per GPU. An asynchronous context manager."""

    def __init__(self, address: str, path: Path, threads: int | None) -> None:
        """`path`: the path of the bundle, the same on every machine."""
        bundle = load_bundle(path, check=False)
        self.digest = bundle.manifest.digest
        self._ray: Any = require("ray", "ray")
        self._address = address
        self._given = (path.resolve(), threads, self.digest)
        backend = (bundle.manifest.target or {}).get("backend", "onnxruntime")
        self._gpus = int(backend != "onnxruntime")  # number of GPUs per actor
        self._load: Counter[Any] = Counter()  # number of requests per actor
        self._why = ""

    async def __aenter__(self) -> Cluster:
        ray = self._ray
        try:
            ray.init(self._address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            hint = "give HOST:PORT as `ray start --head` printed it"
            raise CanvasError(f"no Ray cluster at {self._address}: {error}", hint) from error
        alive = [each["Resources"] for each in ray.nodes() if each["Alive"]]
        count = sum(int(each.get("GPU", 0)) if self._gpus else 1 for each in alive)
        if not count:
            raise CanvasError(f"the Ray cluster at {self._address} has no GPU", "add a machine")
        kind = ray.remote(_Actor).options(scheduling_strategy="SPREAD", num_gpus=self._gpus)
        self._load.update({kind.remote(*self._given): 0 for _ in range(count)})
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._ray.shutdown()

    async def ask(self, line: Line) -> Reply:
        """Return the reply of the actor that has the fewest requests. Raises CanvasError if the engines fail for good,
        or if no actor is left."""
        errors = self._ray.exceptions
        while self._load:
            actor = min(self._load, key=lambda each: self._load[each])
            self._load[actor] += 1
            try:
                return Reply(*await actor.ask.remote(line))
            except errors.RayActorError as error:
                self._why = str(error)
                self._load.pop(actor, None)
            except errors.RayTaskError as error:
                raise EngineError(str(error.cause), fatal=True) from error
            finally:
                if actor in self._load:
                    self._load[actor] -= 1
        raise CanvasError(
            f"no actor is left: {self._why}", "repeat the command: it continues from here"
        )


class _Actor:
    """A bundle on one machine, opened at the first request."""

    def __init__(self, path: Path, threads: int | None, digest: str) -> None:
        self._local = Local(path, threads)
        if self._local.digest != digest:
            raise CanvasError(
                f"{path} is not the same on all machines", "copy the same bundle to every machine"
            )
        self._opened: asyncio.Task[Local] | None = None

    async def ask(self, line: Line) -> tuple[Any, ...]:
        """Return the fields of the `Reply`."""
        self._opened = self._opened or asyncio.create_task(self._local.__aenter__())
        return tuple(await (await self._opened).ask(line))
