"""The two models that Triton's Python backend runs; the stream model holds the engines."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

# Exists only inside Triton's Python backend.
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found,unused-ignore]

from canvasrt.bundle import load_bundle
from canvasrt.containers.heartbeat import Heartbeat, leave_reason
from canvasrt.containers.names import HEARTBEAT_VARIABLE, REASON_VARIABLE, STOPPING_VARIABLE
from canvasrt.containers.tensors import (
    ANSWERS,
    ARRIVED,
    ERROR_EVENT,
    ERRORS,
    GRAMMAR,
    IMAGES,
    OWNER,
    STREAM_MODEL,
    TOKENIZE,
    check_parameters,
    check_shapes,
    outputs_of,
    read_inputs,
)
from canvasrt.containers.triton.decisions import DecisionReplies, InfillReplies
from canvasrt.containers.triton.grammar import prepare_grammars
from canvasrt.containers.triton.metrics import Metrics
from canvasrt.containers.triton.options import ModelOptions
from canvasrt.containers.triton.preparing import Preparing
from canvasrt.containers.triton.prompt_encoder import PromptEncoder, is_long
from canvasrt.containers.triton.replies import ReplyBuilder
from canvasrt.containers.triton.request import ServedRequest, read_request
from canvasrt.containers.triton.sink import FINAL, ResponseSink, describe, error_response
from canvasrt.containers.triton.tickets import Overloaded, Ticket
from canvasrt.containers.triton.tokenize import tokenized
from canvasrt.containers.triton.worker import CANCEL_INTERVAL, Worker
from canvasrt.defaults import MAX_BATCH
from canvasrt.errors import CanvasError, EngineError
from canvasrt.runtime.answers.constrained import SEARCHES
from canvasrt.runtime.answers.infill import GapRequest
from canvasrt.runtime.generator import Generator
from canvasrt.runtime.open import open_model
from canvasrt.runtime.prefix import PrefixCache
from canvasrt.runtime.tokenizer import Tokenizer
from canvasrt.watch import Watch

log = logging.getLogger(__name__)

_LAST_REPLIES = 0.3  # seconds for Triton to take the last error replies
# Inputs that take long to read, however short.
_SLOW = {IMAGES.name, GRAMMAR.name}
# The answer model adds these parameters to its calls to the stream model. A failed call between
# models loses its error code, so the error comes back as an event.
CALL_PARAMETER, CANCEL_PARAMETER = "triton_canvasrt_call", "triton_canvasrt_cancel"


class StreamModel:
    """The decoupled model, which sends a request's drafts, blocks and result as they come."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {k: v["string_value"] for k, v in config.get("parameters", {}).items()}
        # `engines` is relative to the model repository, the parent of this model's folder.
        engines = Path(args["model_repository"]).parent / parameters["engines"]
        options = ModelOptions.from_environment(os.environ)
        self._model = open_model(
            engines,
            threads=options.threads,
            share_passes=options.share_passes,
            max_context=options.max_model_len,
        )
        self._model.warm_up()
        bundle = load_bundle(engines, check=False)  # open_model has checked it
        manifest = bundle.manifest
        self._tokenizer = Tokenizer.load(bundle) if manifest.tokenizer else None
        if self._tokenizer is not None:
            prepare_grammars(self._model, self._tokenizer)
        max_batch = int(
            parameters.get("max_batch") or manifest.options.get("max_batch") or MAX_BATCH
        )
        prefixes = PrefixCache(self._model, options.prefix_cache * 2**20)

        def generator() -> Generator:
            prefixes.clear()  # what a failed pass wrote is not known
            return Generator(self._model, max_batch, prefixes)

        # What takes long to prepare is prepared here, so that other requests need not wait for it.
        self._preparing = Preparing()
        self._executing = Watch()
        heartbeat = os.environ.get(HEARTBEAT_VARIABLE)
        self._worker = Worker(
            generator,
            Metrics(pb_utils).update,
            partial(self._beat, Heartbeat.at(heartbeat)) if heartbeat else lambda: None,
            _end_process,
            options.max_queue_tokens,
            options.request_timeout,
        )
        self._options = options
        self._encoder = PromptEncoder(self._tokenizer, self._model.max_context)
        self._cancelled_calls: dict[str, threading.Event] = {}

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            parameters = json.loads(request.parameters() or "{}")
            if CANCEL_PARAMETER in parameters:
                self._cancel_call(str(parameters[CANCEL_PARAMETER]))
                sender.send(flags=FINAL)
                continue
            call = parameters.get(CALL_PARAMETER)
            sink = ResponseSink(sender, error_events=call is not None or ERRORS in parameters)
            try:
                with self._executing.busy():
                    self._admit(request, parameters, sink, call)
            except BaseException as error:  # it would wait for ever
                sink.fail(error)

    def _beat(self, heartbeat: Heartbeat) -> None:
        """Show the progress of passes, as far as no other thread hangs."""
        watches = (self._executing, self._preparing.watch, SEARCHES)
        heartbeat.beat(min(each.since for each in watches))

    def finalize(self) -> None:
        self._preparing.close()
        self._worker.close()

    def _admit(
        self, request: Any, parameters: dict[str, Any], sink: ResponseSink, call: str | None
    ) -> None:
        check_parameters(parameters, STREAM_MODEL)
        tensors = request.inputs()
        check_shapes({each.name(): each.shape() for each in tensors}, self._model.max_context)
        if os.path.exists(os.environ.get(STOPPING_VARIABLE, "")):
            raise Overloaded("the server is stopping", "send the request to another server")
        arrays = {tensor.name(): np.array(tensor.as_numpy()) for tensor in tensors}
        if call is not None:
            cancel = self._cancelled_calls.setdefault(str(call), threading.Event())
            sink.cancel = cancel
            sink.on_end = lambda: self._cancelled_calls.pop(str(call), cancel)
        texts = {
            name: each[0] for name, each in arrays.items() if each.dtype == object and each.size
        }
        begin = min(time.monotonic(), int(parameters.get(ARRIVED, 2**63)) / 1e6)
        owner = str(parameters.get(OWNER, ""))
        ticket = self._worker.take_ticket(owner, sink, begin)
        submit = partial(self._submit, arrays, parameters, sink, call, ticket)
        if is_long(texts) or not _SLOW.isdisjoint(arrays):
            self._preparing.submit(owner or uuid.uuid4().hex, submit, sink.fail)
        else:
            submit()

    def _submit(
        self,
        arrays: dict[str, np.ndarray],
        parameters: dict[str, Any],
        sink: ResponseSink,
        call: str | None,
        ticket: Ticket,
    ) -> None:
        """Prepare a request and queue it. Otherwise its ticket is given back."""
        try:
            served = self._prepared(arrays, parameters, sink, ticket)
            if served is not None:
                sink.replies = _replies(served, self._tokenizer, only_final=bool(call))
        except BaseException:
            ticket.leave()
            raise
        if served is None:
            ticket.leave()
        else:
            self._worker.submit(served.request, ticket)

    def _prepared(
        self,
        arrays: dict[str, np.ndarray],
        parameters: dict[str, Any],
        sink: ResponseSink,
        ticket: Ticket,
    ) -> ServedRequest | None:
        """Return the request to run; None for one that is answered without."""
        if sink.cancelled():
            raise CanvasError("the request was cancelled")
        ticket.check_late()
        owner, answers = ticket.owner, int(parameters.get(ANSWERS, 1))
        if TOKENIZE.name in arrays:
            vocab_size = self._model.config.vocab_size
            sink.answer(tokenized(read_inputs(arrays), self._encoder, vocab_size, owner))
            return None
        return read_request(
            arrays, self._model, self._encoder, self._options, owner, max(1, answers)
        )

    def _cancel_call(self, call: str) -> None:
        cancel = self._cancelled_calls.get(call)
        if cancel is not None:
            cancel.set()


def _replies(
    served: ServedRequest, tokenizer: Tokenizer | None, only_final: bool
) -> ReplyBuilder | DecisionReplies | InfillReplies:
    if served.ask is not None:
        return DecisionReplies(served.ask)
    if isinstance(served.request, GapRequest):
        return InfillReplies(tokenizer)
    return ReplyBuilder(
        tokenizer,
        served.request.params,
        served.drafts,
        only_final=only_final,
        stops=served.stops,
        prompt=served.request.prompt_token_ids,
        control=served.control,
        opening=served.opening,
    )


class AnswerModel:
    """The model for a single answer: calls the stream model and returns its final event.

    Triton's HTTP `infer` refuses decoupled models. This model holds no engines.
    """

    def initialize(self, args: dict[str, str]) -> None:
        self._name = args["model_name"]
        self._outputs = [tensor.name for tensor in outputs_of(self._name)]
        self._open: dict[str, Any] = {}  # call → response sender
        self._lock = threading.Lock()
        # Triton 24.10's stub for Python 3.12 reads a response after handing it over, and crashes if
        # it was freed.
        self._recent: deque[Any] = deque(maxlen=1024)
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="canvasrt-watch", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            parameters = json.loads(request.parameters() or "{}")
            try:
                check_parameters(parameters, self._name)
            except CanvasError as error:
                sender.send(error_response(*describe(error)), flags=FINAL)
                continue
            # One thread per request, so that any number can wait for the stream model at once.
            arrived = parameters.get(ARRIVED, int(time.monotonic() * 1e6))
            threading.Thread(target=self._answer, args=(sender, request, arrived)).start()

    def finalize(self) -> None:
        self._stopping.set()
        self._watcher.join()

    def _answer(self, sender: Any, request: Any, arrived: int) -> None:
        call = uuid.uuid4().hex
        with self._lock:
            self._open[call] = sender
        try:
            response = self._ask(call, request.inputs(), arrived)
        except BaseException as error:
            response = error_response(*describe(error))
        with self._lock:
            del self._open[call]
        sender.send(response, flags=FINAL)

    def _ask(self, call: str, inputs: list[Any], arrived: int) -> Any:
        """Return the stream model's final event as this model's response."""
        request = pb_utils.InferenceRequest(
            model_name=STREAM_MODEL,
            requested_output_names=["event", *self._outputs],
            inputs=inputs,
            parameters={CALL_PARAMETER: call, ARRIVED: arrived},
        )
        tensors: dict[str, Any] = {}
        for response in request.exec(decoupled=True):
            self._recent.append(response)
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            tensors = {each.name(): each for each in response.output_tensors()} or tensors
        if not tensors:
            return error_response("CANCELLED", "the request was cancelled")
        if tensors["event"].as_numpy()[0] == ERROR_EVENT.encode():
            return error_response(**json.loads(tensors["text"].as_numpy()[0]))
        # Only some events have `block_scores`.
        found = [tensors[name] for name in self._outputs if name in tensors]
        return pb_utils.InferenceResponse(found)

    def _watch(self) -> None:
        """Report cancelled requests to the stream model; calls between models do not pass that on."""
        while not self._stopping.wait(CANCEL_INTERVAL):
            try:
                self._pass_on_cancelled()
            except Exception:  # a thread that ended would cancel nothing any more
                log.exception("cannot report a cancelled request")

    def _pass_on_cancelled(self) -> None:
        with self._lock:
            cancelled = {call for call, sender in self._open.items() if sender.is_cancelled()}
        for call in cancelled:
            request = pb_utils.InferenceRequest(
                model_name=STREAM_MODEL,
                requested_output_names=["event"],
                inputs=[],
                parameters={CANCEL_PARAMETER: call},
            )
            self._recent.extend(request.exec(decoupled=True))


def _end_process(error: EngineError) -> None:
    """End this process, whose supervisor then ends the service.

    Without a supervisor the requests are only refused: Triton itself would stay ready.
    """
    reason = os.environ.get(REASON_VARIABLE)
    if reason:
        leave_reason(Path(reason), error.message, error.hint)
        time.sleep(_LAST_REPLIES)
        os._exit(error.exit_code)
