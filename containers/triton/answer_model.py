"""The model that returns single answers. The decoupled model cannot return them, because Triton's `infer` call
refuses decoupled models."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections import deque
from typing import Any

# Exists only inside Triton's Python backend.
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found,unused-ignore]

from canvasrt.containers.tensors import (
    ARRIVED,
    CANCEL_PARAMETER,
    ERROR_EVENT,
    OWNER,
    STREAM_MODEL,
    outputs_of,
)
from canvasrt.containers.triton.inputs import check_parameters
from canvasrt.containers.triton.sink import (
    CALL_PARAMETER,
    FINAL,
    error_response,
)
from canvasrt.containers.triton.tickets import CANCEL_INTERVAL, describe

log = logging.getLogger(__name__)


class AnswerModel:
    """Calls the decoupled model and returns its final event. It has no engines."""

    def initialize(self, args: dict[str, str]) -> None:
        self._name = args["model_name"]
        self._outputs = [tensor.name for tensor in outputs_of(self._name)]
        self._open: dict[str, Any] = {}  # call → response sender
        self._lock = threading.Lock()
        # Triton 24.10's stub for Python 3.12 reads a response after sending it, and crashes if the response was freed.
        self._recent: deque[Any] = deque(maxlen=1024)
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="canvasrt-watch", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            # One thread per request, so that any number of requests can wait for the decoupled model.
            arrived = int(time.monotonic() * 1e6)
            threading.Thread(target=self._answer, args=(request, arrived)).start()

    def finalize(self) -> None:
        self._stopping.set()
        self._watcher.join()

    def _answer(self, request: Any, arrived: int) -> None:
        sender = request.get_response_sender()
        call = uuid.uuid4().hex
        with self._lock:
            self._open[call] = sender
        try:
            parameters = json.loads(request.parameters() or "{}")
            check_parameters(parameters, self._name)
            given = {name: parameters[name] for name in (OWNER, ARRIVED) if name in parameters}
            given = {CALL_PARAMETER: call, ARRIVED: arrived, **given}
            response = self._ask(request.inputs(), given)
        except BaseException as error:
            response = error_response(*describe(error))
        with self._lock:
            del self._open[call]
        sender.send(response, flags=FINAL)

    def _ask(self, inputs: list[Any], parameters: dict[str, Any]) -> Any:
        """Return the decoupled model's final event as this model's response."""
        tensors: dict[str, Any] = {}
        for response in self._call(parameters, inputs, ["event", *self._outputs]):
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            tensors = {each.name(): each for each in response.output_tensors()} or tensors
        if not tensors:
            return error_response("CANCELLED", "the request was cancelled")
        if tensors["event"].as_numpy()[0] == ERROR_EVENT.encode():
            return error_response(**json.loads(tensors["text"].as_numpy()[0]))
        # Only some events have `block_scores`.
        return pb_utils.InferenceResponse(
            [tensors[name] for name in self._outputs if name in tensors]
        )

    def _call(self, parameters: dict[str, Any], inputs: list[Any], outputs: list[str]) -> Any:
        """Yield the decoupled model's responses."""
        request = pb_utils.InferenceRequest(
            model_name=STREAM_MODEL,
            requested_output_names=outputs,
            inputs=inputs,
            parameters=parameters,
        )
        for response in request.exec(decoupled=True):
            self._recent.append(response)
            yield response

    def _watch(self) -> None:
        """Report cancelled requests to the decoupled model, because calls between models do not propagate
        cancellation."""
        while not self._stopping.wait(CANCEL_INTERVAL):
            try:
                with self._lock:
                    cancelled = [call for call, each in self._open.items() if each.is_cancelled()]
                for call in cancelled:
                    list(self._call({CANCEL_PARAMETER: call}, [], ["event"]))
            except Exception:  # the thread must survive, or nothing would be cancelled any more
                log.exception("cannot report a cancelled request")
