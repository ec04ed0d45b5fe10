"""Makes random calls over HTTP and gRPC. There must be no status 500 and no hang, and answers to good requests in
between must be right."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from canvasrt.containers.tensors import inputs_of
from tests.faults import attack, grammars
from tests.helpers.serving_process import ANY_PORTS, serving

# These limits keep random requests short.
LIMITS = ("--max-steps", "50", "--max-passes", "400", "--request-timeout", "20")
_SHORT = {"max_tokens": 3, "max_denoising_steps": 2}
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
_CHOICE = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_USE = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "b"}
# One good body for each kind of request. Parts of them are replaced at random.
GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": ["12+34=", "a"], **_SHORT}),
    ("/v1/completions", {"prompt": [3, 4, 5], **_SHORT}),
    ("/v1/responses", {"input": "12+34=", **_SHORT}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "", "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "a", "content": "b"},
            ],
            "tools": [_TOOL],
            "chat_template_kwargs": {"enable_thinking": False},
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}},
            **_SHORT,
        },
    ),
    (
        "/v1/responses",
        {"input": [{"type": "message", "role": "user", "content": "a"}], "tools": []},
    ),
    ("/v1/decisions", {"input": "a", "questions": [_CHOICE], "samples": 1, "temperatures": {}}),
    (
        "/v1/systemone",
        {"state": {"a": 1}, "questions": {"q": {"type": "noul", "instructions": "x"}}},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "diffusion_seed_canvas": [3, 4, 5, 6, 7, 8, 9, 10],
            "diffusion_pinned": [0, 2],
            "diffusion_canvas_length": 8,
            "structured_outputs": {"regex": "[0-9]"},
            **_SHORT,
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}, _USE]},
                {"role": "user", "content": [_RESULT]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            **_SHORT,
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}], "system": "b"}),
    ("/v1/infill", {"text": "a {2} b", "prompt": "a", "max_denoising_steps": 2}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "return_token_strs": True}),
    ("/detokenize", {"tokens": [3, 4]}),
    (
        "/api/chat",
        {
            "messages": [{"role": "user", "content": "a", "images": []}],
            "options": {"num_predict": 3, "max_denoising_steps": 2},
            "stream": False,
        },
    ),
    ("/api/generate", {"prompt": "a", "options": {"num_predict": 3}, "system": "b", "raw": False}),
)
OTHERS = ("/v1/models", "/v1/models/x", "/v1/metadata", "/v1/health/live", "/", "/v1/none", "/%00")
GOOD_EVERY = 20
_FIELDS = (
    *("model", "messages", "prompt", "input", "n", "seed", "stop", "stream", "stream_options"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "tools", "tool_choice"),
    *("response_format", "reasoning_effort", "metadata", "logit_bias", "max_denoising_steps"),
    *("entropy_bound", "t_min", "t_max", "stability_threshold", "early_stop", "drafts", "unknown"),
)


class Fuzzer:
    """Draws random calls from a seed. `share` is the share of calls with a grammar."""

    def __init__(self, seed: int, share: float = 0.0) -> None:
        self.draw = random.Random(seed)
        self.share = share

    def value(self, depth: int = 0) -> Any:
        """Return a random JSON value."""
        draw = self.draw
        if depth < 3 and draw.random() < 0.25:
            count = draw.choice([0, 1, 2, 5])
            if draw.random() < 0.5:
                return [self.value(depth + 1) for _ in range(count)]
            return {self.text(): self.value(depth + 1) for _ in range(count)}
        numbers = [0, 1, -1, 2, 7, 1e-45, 1e308, -1e308, 0.5, 2**31, 2**53, 2**64, -(2**63), 10**40]
        others = [True, False, None, "", "canvasrt", "auto", "none", self.text()]
        return draw.choice(numbers + others)

    def text(self) -> str:
        """Return a random text."""
        draw = self.draw
        pieces = [
            "a",
            "\x00",
            "\n",
            "é",
            "\U0001f600",
            "<|turn>",
            "<|channel>",
            "{{",
            "\u202e",
            " ",
        ]
        return "".join(draw.choices(pieces, k=draw.choice([0, 1, 3, 20, 2000])))

    def changed(self, value: Any, share: float) -> Any:
        """Return a JSON value in which random parts, `share` of them, are replaced or removed."""
        if self.draw.random() < share:
            return self.value()
        if isinstance(value, dict):
            kept = [name for name in value if self.draw.random() >= share / 2]
            return {name: self.changed(value[name], share) for name in kept}
        if isinstance(value, list):
            return [self.changed(each, share) for each in value] * self.draw.choice([1, 1, 1, 3])
        return value

    def request(self) -> bytes:
        """Return a whole HTTP request."""
        draw = self.draw
        (path, good), method = draw.choice(GOOD), "POST"
        made = self.changed({"model": "canvasrt", **good}, draw.choice([0, 0.02, 0.1]))
        if isinstance(made, dict) and draw.random() < 0.5:
            made |= {draw.choice(_FIELDS): self.value() for _ in range(draw.choice([1, 1, 2, 4]))}
        body = json.dumps(made).encode()
        if draw.random() < self.share:
            return _whole("POST", *self.followed())
        headers = {"Host": "127.0.0.1", "Content-Type": "application/json"}
        kind = draw.random()
        if kind < 0.1:  # damaged JSON
            at = draw.randrange(len(body))
            body = body[:at] + draw.randbytes(draw.choice([0, 1, 4])) + body[at + 1 :]
        elif kind < 0.2:
            path, method = (
                draw.choice(OTHERS),
                draw.choice(["GET", "POST", "PUT", "HEAD", "OPTIONS"]),
            )
        elif kind < 0.25:
            headers[draw.choice(["Authorization", "Content-Type", "Host", "Accept"])] = "\t".join(
                draw.choices(["a", "é", "Bearer", "*/*", "127.0.0.1"], k=3)
            )
        elif kind < 0.3:
            body = draw.randbytes(draw.choice([0, 10, 3000]))
        if draw.random() < 0.1:
            cut = draw.choice([1, 100, 10_000])
            pieces = [body[i : i + cut] for i in range(0, len(body), cut)] + [b""]
            body = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in pieces)
            headers["Transfer-Encoding"] = "chunked"
        else:
            headers["Content-Length"] = str(len(body))
        if draw.random() < 0.03:
            headers["Content-Length"] = draw.choice(["-1", "abc", "0", str(2**70), "5, 6"])
        return _whole(method, path, body, headers)

    def followed(self) -> tuple[str, bytes]:
        """Return the path and the body of a request with a grammar."""
        draw = self.draw
        body = {"model": "canvasrt", **_SHORT, "response_format": grammars.response_format(draw)}
        if draw.random() < 0.5:
            return "/v1/completions", json.dumps({**body, "prompt": "12+34="}).encode()
        chat = {"messages": [{"role": "user", "content": "12+34="}], "stream": draw.random() < 0.3}
        return "/v1/chat/completions", json.dumps({**body, **chat}).encode()

    def tensors(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return the model, inputs and parameters of a gRPC request."""
        draw = self.draw
        model = draw.choice(["canvasrt", "canvasrt_stream"])
        known = {each.name: each for each in inputs_of(model)}
        names = draw.sample(sorted(known), draw.choice([0, 1, 2, 4]))
        if draw.random() < 0.8:
            names = [each for each in names if each not in ("prompt", "messages", "prompt_ids")]
            names.append(draw.choice(["prompt", "messages", "prompt_ids"]))
        made = [self._tensor(name, known[name].datatype) for name in names]
        if draw.random() < self.share:
            given = {"prompt": b"12+34=", "grammar": grammars.tensor(draw)}
            return model, [self._text(name, value) for name, value in given.items()], {}
        if draw.random() < 0.1:
            made.append(self._tensor(self.text()[:40] or "x", "INT32"))
        parameters = {
            "canvasrt_errors": 1,
            self.text()[:20] or "x": self.draw.choice([1, "a", True]),
        }
        return model, made, parameters if draw.random() < 0.2 else {}

    def _text(self, name: str, value: bytes) -> Any:
        tensor = tritonclient.grpc.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([value], np.object_))
        return tensor

    def _tensor(self, name: str, datatype: str) -> Any:
        draw = self.draw
        datatype = (
            draw.choice(["BYTES", "INT32", "FP32", "BOOL", "UINT64"])
            if (draw.random() < 0.1)
            else datatype
        )
        shape = draw.choice([[1], [1], [1], [3], [0], [1, 1], [2, 2], [5000]])
        count = int(np.prod(shape))
        if datatype == "BYTES":
            chat = json.dumps([{"role": "user", "content": self.text()}])
            options = [self.text(), chat, json.dumps(self.value()), "12+34="]
            data = [draw.choice(options).encode("utf-8", "replace") for _ in range(count)]
            array = np.array(data or [b""], np.object_)[:count]
        else:
            kind = {"INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_, "UINT64": np.uint64}
            numbers = [0, 1, 2, 3, 50, 2**31 - 1] + ([] if datatype in ("UINT64", "BOOL") else [-1])
            values = draw.choices(
                [*numbers, *([np.nan, np.inf, 1e-40] * (datatype == "FP32"))], k=count
            )
            array = np.array(values or [0]).astype(kind[datatype])[:count]
        tensor = tritonclient.grpc.InferInput(name, shape, datatype)
        tensor.set_data_from_numpy(array.reshape(shape))
        return tensor


def _whole(method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a whole HTTP request."""
    if headers is None:
        headers = {"Host": "127.0.0.1", "Content-Type": "application/json"}
        headers |= {"Content-Length": str(len(body))}
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def call_http(host: str, request: bytes) -> str:
    """Send one request; return the status, or `closed`."""
    name, _, port = host.partition(":")
    with socket.create_connection((name, int(port)), timeout=60) as connection:
        try:
            connection.sendall(request)
            reply = http.client.HTTPResponse(connection)
            reply.begin()
            reply.read()
        except (ConnectionError, http.client.HTTPException):
            return "closed"
        return str(reply.status)


def call_grpc(client: Any, model: str, tensors: list[Any], parameters: dict[str, Any]) -> str:
    """Make one call; return its outcome."""
    replies: list[Any] = []
    try:
        if model == "canvasrt":
            client.infer(model, tensors, parameters=parameters, client_timeout=60)
            return "grpc ok"
        done = threading.Event()

        def take(result: Any, error: Any) -> None:
            replies.append((result, error))
            end = result is not None and result.as_numpy("event")[0] in (b"final", b"error")
            if error is not None or end:
                done.set()

        client.start_stream(callback=take, stream_timeout=90)
        try:
            client.async_stream_infer(model, tensors, parameters=parameters)
            if not done.wait(60):
                return "grpc hang"
            result, error = replies[-1]  # ending the stream adds a reply
        finally:
            client.stop_stream(cancel_requests=True)
        if error is not None:
            return f"grpc {describe(error)}"
        return "grpc " + bytes(result.as_numpy("event")[0]).decode()
    except InferenceServerException as error:
        return f"grpc {describe(error)}"


def describe(error: InferenceServerException) -> str:
    """Return the code of an error, or `internal` if it shows a bug in the models."""
    text = str(error.message())
    # Messages of llguidance contain "Parser Error:". The name of an exception is one word.
    if re.search(r"Traceback|\wError:|unhealthy", text):
        return f"internal: {text[:200]}"
    return str(error.status() or "refused")


def run(
    package: Path, folder: Path, calls: int, seed: int, share: float = 0.2
) -> tuple[Counter[str], list[str]]:
    """Make random calls, `share` of them with a grammar. Return the outcomes, and descriptions of what was wrong."""
    fuzzer, outcomes, wrong = Fuzzer(seed, share), Counter[str](), []
    with serving(package, folder, *ANY_PORTS, *LIMITS) as running:
        host = running.host
        known = attack.known_answers(host)
        for number in range(calls):
            if number % 3 < 2:
                request = fuzzer.request()
                try:
                    outcome = call_http(host, request)
                except TimeoutError:
                    outcome = "hang"
                if outcome in ("hang", "500", "501", "502"):
                    wrong.append(f"{outcome}: {request[:2000]!r}")
                outcomes[f"http {outcome}"] += 1
            else:
                # Every call has its own connection, since a stream's connection may end with the call.
                with tritonclient.grpc.InferenceServerClient(running.said["grpc"]) as client:
                    drawn = fuzzer.tensors()
                    outcome = call_grpc(client, *drawn)
                if "internal" in outcome or "hang" in outcome:
                    shown = [(each.name(), each.shape(), each.datatype()) for each in drawn[1]]
                    wrong.append(f"{outcome}: {drawn[0]} {shown} {drawn[2]}")
                outcomes[outcome] += 1
            if number % GOOD_EVERY == 0:
                question = fuzzer.draw.choice(attack.QUESTIONS)
                status, body, _ = attack.known(host, question)
                right = status == 200 and attack.text_of(body) == known[question]
                outcomes["good, right" if right else "good, wrong"] += 1
                if not right:
                    wrong.append(f"{question}: {status} {body}")
        if running.process.poll() is not None:
            wrong.append(f"the server ended with {running.process.returncode}")
    return outcomes, wrong
