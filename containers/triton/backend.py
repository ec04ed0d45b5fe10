"""The decoupled model, which runs the engines in Triton's Python backend."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

# Exists only inside Triton's Python backend.
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found,unused-ignore]

from canvasrt.containers.heartbeat import Heartbeat, leave_reason
from canvasrt.containers.logs import configure
from canvasrt.containers.names import (
    EVIDENCE_VARIABLE,
    GPUS_VARIABLE,
    HEARTBEAT_VARIABLE,
    LEVEL_VARIABLE,
    REASON_VARIABLE,
    STOPPING_VARIABLE,
)
from canvasrt.containers.tensors import ANSWERS, ARRIVED, CANCEL_PARAMETER, ERRORS, STREAM_MODEL
from canvasrt.containers.triton.answer_model import AnswerModel
from canvasrt.containers.triton.inputs import caller_of, check_parameters, check_shapes, read_inputs
from canvasrt.containers.triton.metrics import Metrics
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.containers.triton.preparing import Preparing
from canvasrt.containers.triton.prompt_encoder import SLOW, is_long
from canvasrt.containers.triton.request import read_request
from canvasrt.containers.triton.sink import CALL_PARAMETER, FINAL, ResponseSink
from canvasrt.containers.triton.start import generator_maker, open_all, prompt_encoder
from canvasrt.containers.triton.tickets import Overloaded, Ticket
from canvasrt.containers.triton.workers import Workers
from canvasrt.defaults import MAX_BATCH
from canvasrt.errors import CanvasError, EngineError
from canvasrt.runtime.model import Model
from canvasrt.runtime.open import open_model
from canvasrt.watch import Watch

__all__ = ["AnswerModel", "StreamModel"]  # existing packages import both from this module

# Seconds for which a preparing thread can hold the interpreter's lock. A pass needs the lock after every segment: with
# Python's default of 5 ms, passes would be several times slower while long texts are prepared.
_SWITCH = 0.0005
_LAST_REPLIES = 0.3  # seconds for Triton to send the last error replies


class StreamModel:
    """Streams a request's drafts, blocks and result."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {k: v["string_value"] for k, v in config.get("parameters", {}).items()}
        # `engines` is relative to the model repository, the parent of this model's folder.
        engines = Path(args["model_repository"]).parent / parameters["engines"]
        options = ModelOptions.from_environment(os.environ)
        configure(int(os.environ.get(LEVEL_VARIABLE, logging.INFO)), json_logs=False)

        def open_one(number: int) -> Model:
            return open_model(
                engines,
                threads=options.threads,
                check=not number,
                share_passes=options.share_passes == "on",
                max_context=options.max_model_len,
                gpu=number,
            )

        count = int(os.environ.get(GPUS_VARIABLE, 1))
        models, evidence = open_all(open_one, count, options.share_passes == "auto")
        if evidence and EVIDENCE_VARIABLE in os.environ:
            Path(os.environ[EVIDENCE_VARIABLE]).write_text(json.dumps(evidence), "utf-8")
        self._model = models[0]  # the models of all GPUs have the same limits
        self._encoder = prompt_encoder(self._model)
        built = self._model.bundle.manifest.options.get("max_batch")
        max_batch = int(parameters.get("max_batch") or built or MAX_BATCH)

        sys.setswitchinterval(_SWITCH)
        # Slow requests are prepared on threads, so that other requests need not wait. Requests that only
        # tokenize share a separate thread.
        self._preparing, self._tokenizing = Preparing(), Preparing(threads=1)
        self._executing = Watch()
        heartbeat = os.environ.get(HEARTBEAT_VARIABLE)
        self._worker = Workers(
            [generator_maker(model, max_batch, options.prefix_cache) for model in models],
            Metrics(pb_utils).update,
            partial(self._beat, Heartbeat.at(heartbeat)) if heartbeat else lambda since: None,
            _end_process,
            options.max_queue_tokens,
            options.request_timeout,
        )
        self._options = options
        self._cancelled_calls: dict[str, threading.Event] = {}

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            parameters = json.loads(request.parameters() or "{}")
            if CANCEL_PARAMETER in parameters:
                if call := self._cancelled_calls.get(str(parameters[CANCEL_PARAMETER])):
                    call.set()
                sender.send(flags=FINAL)
                continue
            errors_as_events = CALL_PARAMETER in parameters or ERRORS in parameters
            sink = ResponseSink(sender, errors_as_events)
            try:
                with self._executing.busy():
                    self._admit(request, parameters, sink)
            except BaseException as error:  # otherwise the caller would wait forever
                sink.fail(error)

    def _beat(self, heartbeat: Heartbeat, since: float) -> None:
        """Report progress until `since`. If another thread has an unfinished task that began before `since`, report
        progress only until the task began."""
        watches = (self._executing, self._preparing.watch, self._tokenizing.watch)
        heartbeat.beat(min(since, *(each.since for each in watches)))

    def finalize(self) -> None:
        self._preparing.close()
        self._tokenizing.close()
        self._worker.close()

    def _admit(self, request: Any, parameters: dict[str, Any], sink: ResponseSink) -> None:
        """Take a ticket for a request, and submit it, either immediately or through the preparing threads."""
        check_parameters(parameters, STREAM_MODEL)
        tensors = request.inputs()
        shapes = {each.name(): each.shape() for each in tensors}
        check_shapes(shapes, self._model.max_context, self._model.config.canvas_length)
        if os.path.exists(os.environ.get(STOPPING_VARIABLE, "")):
            raise Overloaded("the server is stopping", "send the request to another server")
        arrays = {tensor.name(): np.array(tensor.as_numpy()) for tensor in tensors}
        owner, guarded = caller_of(parameters)
        calls = [str(each) for each in (parameters.get(CALL_PARAMETER), guarded) if each]
        if calls:
            sink.cancel = threading.Event()
            self._cancelled_calls |= dict.fromkeys(calls, sink.cancel)
            sink.on_end = lambda: [self._cancelled_calls.pop(each, None) for each in calls]
        begin = min(time.monotonic(), int(parameters.get(ARRIVED, 2**63)) / 1e6)
        ticket = self._worker.take_ticket(owner, sink, begin)
        submit = partial(self._submit, arrays, parameters, sink, ticket)
        texts = {
            name: each[0] for name, each in arrays.items() if each.dtype == object and each.size
        }
        if is_long(texts) or not SLOW.isdisjoint(arrays):
            threads = self._tokenizing if "tokenize" in arrays else self._preparing
            threads.submit(owner or uuid.uuid4().hex, submit, sink.fail)
        else:
            submit()

    def _submit(
        self,
        arrays: dict[str, np.ndarray],
        parameters: dict[str, Any],
        sink: ResponseSink,
        ticket: Ticket,
    ) -> None:
        """Prepare a request and queue it, or answer it without a pass. Gives the ticket back unless the request is
        queued."""
        try:
            if sink.cancelled():
                raise CanvasError("the request was cancelled")
            ticket.check_late()
            if "tokenize" in arrays:
                vocab_size = self._model.config.vocab_size
                values = read_inputs(arrays)
                sink.answer(self._encoder.tokenized(values, vocab_size, ticket.owner))
                ticket.leave()
                return
            served = read_request(
                arrays,
                self._model,
                self._encoder,
                self._options,
                ticket.owner,
                max(1, int(parameters.get(ANSWERS, 1))),
                only_final=CALL_PARAMETER in parameters,
            )
        except BaseException:
            ticket.leave()
            raise
        sink.replies = served.replies
        self._worker.submit(served.request, ticket)


def _end_process(error: EngineError) -> None:
    """Exit this process; then the supervisor stops the server.

    Without a supervisor, do nothing: requests are refused, but Triton remains ready.
    """
    reason = os.environ.get(REASON_VARIABLE)
    if reason:
        leave_reason(Path(reason), error.message, error.hint)
        time.sleep(_LAST_REPLIES)
        os._exit(error.exit_code)
