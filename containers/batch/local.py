"""Answers requests by running a bundle in this process. Parses requests and builds replies with
the front end's code, but without Triton."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from canvasrt.bundle import load_bundle
from canvasrt.containers.batch.lines import Line
from canvasrt.containers.batch.run import Reply
from canvasrt.containers.openai.app import ENDPOINTS
from canvasrt.containers.openai.body import read_body
from canvasrt.containers.openai.endpoint import Run
from canvasrt.containers.openai.errors import ApiError
from canvasrt.containers.openai.fields import Ignored
from canvasrt.containers.openai.generation import Served, answer_inputs
from canvasrt.containers.openai.metrics import FrontMetrics
from canvasrt.containers.openai.upstream import triton_error
from canvasrt.containers.tensors import ANSWERS, INPUTS, OUTPUTS, StreamEvent
from canvasrt.containers.triton.inputs import check_shapes
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.containers.triton.preparing import Preparing
from canvasrt.containers.triton.prompt_encoder import SLOW, is_long
from canvasrt.containers.triton.replies import Replies
from canvasrt.containers.triton.request import read_request
from canvasrt.containers.triton.start import generator_maker, open_all, prompt_encoder
from canvasrt.containers.triton.tickets import Ticket, describe
from canvasrt.containers.triton.worker import Worker
from canvasrt.defaults import MAX_BATCH
from canvasrt.errors import EngineError
from canvasrt.runtime.open import open_model
from canvasrt.runtime.request import Event

_PAUSE = 0.1  # seconds until a refused request is tried again
_ENDPOINTS = {each.path: each for each in ENDPOINTS}


class Local:
    """A model in this process, as an asynchronous context manager that opens and closes it."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        """`path`: a bundle of engines or graphs. Raises CanvasError if the bundle cannot be loaded."""
        bundle = load_bundle(path, check=False)
        self.digest = bundle.manifest.digest
        self._max_batch = int(bundle.manifest.options.get("max_batch") or MAX_BATCH)
        self._bundle, self._options = bundle, ModelOptions(threads=threads)
        self._metrics = FrontMetrics()
        self._lost: EngineError | None = None

    async def __aenter__(self) -> Local:
        bundle, options = self._bundle, self._options
        (model,), _ = open_all(
            lambda gpu: open_model(bundle.path, options.threads, gpu=gpu), 1, True
        )
        self._model = model
        self._encoder = prompt_encoder(model)
        self._thinks = bundle.mentions("enable_thinking")
        canvas = model.config.canvas_length
        self._served = Served(
            max_context=model.max_context, canvas=canvas, fingerprint=f"fp_{self.digest[:12]}"
        )
        self._preparing = Preparing()
        self._worker = Worker(
            generator_maker(model, self._max_batch, options.prefix_cache), lost=self._lose
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._preparing.close()
        self._worker.close()

    async def ask(self, line: Line) -> Reply:
        """Return the reply that a server would give. Raises EngineError if the engines have failed for good."""
        while True:
            reply = await self._reply(line)
            if self._lost is not None and (reply.status or 0) >= 500:
                raise self._lost
            if reply.status != 503:
                return reply
            await asyncio.sleep(_PAUSE)  # meanwhile, a worker that has failed calls `_lose`

    async def _reply(self, line: Line) -> Reply:
        endpoint = _ENDPOINTS[line.url]
        ignored = Ignored(thinks=self._thinks)
        try:
            body = read_body(endpoint.body, line.body, ignored)
            with endpoint.naming():
                asked = endpoint.parse(body)
                inputs = answer_inputs(asked, self._served)
            run = Run(endpoint, body, asked, inputs, self._served, self, self._metrics, {})
            return Reply(200, run.reply.whole(await run.answers()))
        except ApiError as error:
            return Reply(error.status, error.to_json())

    async def stream(
        self, inputs: Mapping[str, Any], parameters: Mapping[str, int | str] | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """Yield the last event of one request. Closing the iterator cancels the request. Raises ApiError if
        the request fails."""
        arrays = {
            name: INPUTS[name].encode(value) for name, value in inputs.items() if value is not None
        }
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[dict[str, Any] | BaseException] = asyncio.Queue()
        sink = _Sink(lambda end: loop.call_soon_threadsafe(ended.put_nowait, end))
        try:
            check_shapes(
                {name: each.shape for name, each in arrays.items()},
                self._model.max_context,
                self._model.config.canvas_length,
            )
            ticket = self._worker.take_ticket("", sink)
            answers = int((parameters or {}).get(ANSWERS, 1))
            submit = partial(self._submit, arrays, answers, sink, ticket)
            if is_long(inputs) or not SLOW.isdisjoint(inputs):
                self._preparing.submit(uuid.uuid4().hex, submit, sink.fail)
            else:
                submit()
            end = await ended.get()
            if isinstance(end, EngineError) and end.fatal:
                self._lost = end  # the worker may not have called `_lose` yet
            if isinstance(end, BaseException):
                raise end
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise triton_error(*describe(error)) from error
        finally:
            sink.ended = True
        yield StreamEvent(
            **{
                name: OUTPUTS[name].decode(OUTPUTS[name].encode(value))
                for name, value in end.items()
            }
        )

    def _submit(self, arrays: Mapping[str, Any], answers: int, sink: _Sink, ticket: Ticket) -> None:
        """Prepare a request and queue it. If preparing fails, gives the ticket back."""
        try:
            served = read_request(
                arrays, self._model, self._encoder, self._options, "", answers, only_final=True
            )
        except BaseException:
            ticket.leave()
            raise
        sink.replies = served.replies
        self._worker.submit(served.request, ticket)

    def _lose(self, error: EngineError) -> None:
        self._lost = error


class _Sink:
    """Receives the end of one request: the last reply, or an error."""

    def __init__(self, end: Callable[[dict[str, Any] | BaseException], object]) -> None:
        self._end = end
        self.replies: Replies | None = None
        self.ended = False

    def event(self, event: Event) -> None:
        assert self.replies is not None
        if self.ended:  # a stop string ended the answer before the generator did
            return
        replies = self.replies.replies(event)
        self.ended = self.replies.ended
        if self.ended and replies:
            self._end(replies[-1])

    def fail(self, error: BaseException) -> None:
        """End the request with an error."""
        if not self.ended:
            self.ended = True
            self._end(error)

    def cancelled(self) -> bool:
        """Return whether the caller no longer waits for the result."""
        return self.ended
