"""Times streamed chat completions of any OpenAI-compatible server."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from canvasrt.containers.client.connection import connection, error_message
from canvasrt.containers.load.sessions import ChatMessage
from canvasrt.defaults import ANSWER_TIMEOUT
from canvasrt.errors import CanvasError, UsageError

_LIST_TIMEOUT = 30.0  # timeout for the list of models, in seconds
# Seconds after which an idle connection is replaced, since the server could have closed it.
_IDLE = 1.0


@dataclass
class TimedCall:
    """The result of one call. `due`, `end` and `pieces` are times of `time.perf_counter`.

    due: scheduled start, from which latencies count. pieces: arrival times of the pieces of text. tokens: the server's
    count if `counted`, otherwise the number of pieces. steps: denoising steps, if the server reports them.
    """

    due: float
    end: float = 0.0
    pieces: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    counted: bool = False
    steps: int | None = None
    error: str = ""

    @property
    def first(self) -> float | None:
        """Seconds from the scheduled start to the first text; None if no text arrived."""
        return self.pieces[0] - self.due if self.pieces else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive pieces. A diffusion model sends blocks; other models send tokens."""
        return [later - sooner for sooner, later in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def total(self) -> float:
        """Seconds from the scheduled start to the end of the call."""
        return self.end - self.due


@dataclass(frozen=True)
class Endpoint:
    """A server. `url`: an address in the form that OpenAI's clients take, with or without `/v1`."""

    url: str
    model: str
    key: str = ""
    timeout: float = ANSWER_TIMEOUT
    max_tokens: int = 64
    extra: tuple[tuple[str, Any], ...] = ()

    def body(self, messages: Sequence[ChatMessage]) -> dict[str, Any]:
        """Return the body of a call."""
        return {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **dict(self.extra),
        }


class LoadConnection:
    """A connection to an endpoint, reused between calls."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._http: http.client.HTTPConnection | None = None
        self._used = 0.0

    def call(self, messages: Sequence[ChatMessage], due: float) -> TimedCall:
        """Make one call. A failure is recorded in the result's `error`."""
        made = TimedCall(due)
        try:
            self._stream(messages, made)
        except TimeoutError:
            made.error = f"no answer within {self._endpoint.timeout:g} s"
        except (OSError, http.client.HTTPException) as error:
            made.error = f"connection: {type(error).__name__}"
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            made.error = f"not a chat completion: {type(error).__name__}"
        made.end = time.perf_counter()
        self._used = time.monotonic()
        if made.error:
            self.close()
        return made

    def close(self) -> None:
        """Close the connection. The next call opens a new one."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def _stream(self, messages: Sequence[ChatMessage], made: TimedCall) -> None:
        end = time.monotonic() + self._endpoint.timeout
        reply = self._ask("POST", "chat/completions", self._endpoint.body(messages))
        if reply.status != 200:
            said = error_message(reply.read())
            made.error = f"HTTP {reply.status}: {said[:198]}" if said else f"HTTP {reply.status}"
            return
        for line in reply:
            if time.monotonic() > end:  # the socket's timeout limits only a single read
                raise TimeoutError
            data = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            _note(json.loads(data), made, time.perf_counter())
        if not made.counted:
            made.tokens = len(made.pieces)
        if not made.pieces and not made.error and not made.counted:
            made.error = "an empty stream"

    def _ask(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        base = urlsplit(root_of(self._endpoint.url))
        if self._http is None:
            address = base.scheme == "https", str(base.hostname), base.port
            self._http = connection(*address, self._endpoint.timeout)
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self._endpoint.key:
            headers["Authorization"] = f"Bearer {self._endpoint.key}"
        text = None if body is None else json.dumps(body).encode()
        if time.monotonic() - self._used > _IDLE:
            self._http.close()  # the request opens a new connection
        self._http.request(method, f"{base.path}/{path}", text, headers)
        return self._http.getresponse()


def first_model(url: str, key: str = "") -> str:
    """Return the name of the first model that a server lists. Raises CanvasError if that fails."""
    try:
        reply = LoadConnection(Endpoint(url, "", key, _LIST_TIMEOUT))._ask("GET", "models")
        if reply.status != 200:
            raise CanvasError(f"{url} answers HTTP {reply.status}", "check the address and the key")
        return str(json.loads(reply.read())["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise CanvasError(
            f"no OpenAI API answers at {url}: {error or type(error).__name__}",
            "give the address that clients use, such as http://localhost:8000/v1",
        ) from error


def root_of(url: str) -> str:
    """Return an address; if it has no path, add `/v1`. Raises UsageError if it is not a valid http or https address."""
    parts = urlsplit(url)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(
            f"{url} is not an address of a server", "give one such as http://localhost:8000/v1"
        )
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def _note(chunk: dict[str, Any], made: TimedCall, now: float) -> None:
    """Add one chunk of a stream to the call's result."""
    if "error" in chunk:
        made.error = "an error in the stream"
        return
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if text:
            made.pieces.append(now)
            made.text += delta.get("content") or ""
    if usage := chunk.get("usage"):
        made.tokens = int(usage["completion_tokens"])
        made.counted = True
        made.steps = usage.get("denoising_steps")
