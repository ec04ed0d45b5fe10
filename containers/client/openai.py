"""A client for OpenAI-compatible servers. It only uses the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from canvasrt.containers import ports
from canvasrt.containers.client import connection as http_connection
from canvasrt.containers.names import API_PORT
from canvasrt.defaults import ANSWER_TIMEOUT
from canvasrt.errors import CanvasError

KEY_VARIABLE = "CANVASRT_API_KEY"
_NAMES = {"max_new_tokens": "max_tokens"}
_START = "start a server with `canvasrt serve`, or give the address of a running one"
PORT_HINT = f"give the OpenAI API's port ({API_PORT} by default) with --url"


class OpenAIClient:
    """A client of one server. `url`: an address in the form that OpenAI's clients take; `http://` and `/v1` are
    optional.

    The API key comes from CANVASRT_API_KEY. Raises UsageError for an invalid `url`.
    """

    def __init__(self, url: str | None = None, timeout: float = ANSWER_TIMEOUT) -> None:
        scheme, self._host, self._port, self._path = _parts(url)
        self._secure = scheme == "https"
        self._timeout = timeout
        self._model: str | None = None
        self.url = address(url)

    def ask(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return one answer: text, finish_reason, usage and seed. `inputs` maps tensor names to values."""
        path, body = _request(inputs, self.model)
        with self._reply("POST", path, body) as reply:
            answer = json.loads(reply.read())
            (choice,) = answer["choices"]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            return {
                "text": text,
                "finish_reason": choice["finish_reason"],
                "seed": answer.get("canvasrt", {}).get("seed", inputs.get("seed")),
                "usage": answer["usage"],
            }

    def stream(self, inputs: Mapping[str, Any]) -> Iterator[str]:
        """Yield the pieces of one answer's text as they arrive."""
        for piece, _ in self.events(inputs):
            if piece:
                yield piece

    def events(
        self, inputs: Mapping[str, Any], drafts: bool = False
    ) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """Yield a pair `(piece, None)` for each piece of one answer's text. If `drafts`, also yield `("", draft)` for
        every denoising step."""
        path, body = _request(inputs, self.model)
        body["stream"] = True
        if drafts:
            body["stream_options"] = {"drafts": True}
        end = time.monotonic() + self._timeout
        with self._reply("POST", path, body) as reply:
            for line in reply:
                if time.monotonic() > end:  # the socket's timeout limits only a single read
                    raise TimeoutError
                data = line.decode().strip().removeprefix("data:").strip()
                # Skip the lines of an event stream that hold no data. A reply that is not an event stream fails below.
                if data in ("", "[DONE]") or data.startswith((":", "event:", "id:", "retry:")):
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise self._refused(chunk["error"]["message"])
                if (draft := chunk.get("canvasrt", {}).get("draft")) is not None:
                    yield "", draft
                for choice in chunk["choices"]:
                    text = (choice.get("delta") or {}).get("content") or choice.get("text")
                    if text:
                        yield text, None

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to any path, such as `decisions`, and return the reply."""
        with self._reply("POST", path, body) as reply:
            found: dict[str, Any] = json.loads(reply.read())
        return found

    @property
    def model(self) -> str:
        """The name of the first model that the server lists."""
        if self._model is None:
            with self._reply("GET", "models") as reply:
                self._model = str(json.loads(reply.read())["data"][0]["id"])
        return self._model

    @contextlib.contextmanager
    def _reply(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http_connection.connection(self._secure, self._host, self._port, self._timeout)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, f"{self._path}/{path}", data, headers)
            reply = connection.getresponse()
            if reply.status != 200:
                text = reply.read()
                shown = f"HTTP {reply.status}: {text[:200].decode(errors='replace')}"
                raise self._refused(http_connection.error_message(text) or shown)
            yield reply
        except TimeoutError as error:
            raise CanvasError(
                f"{self.url} did not answer within {self._timeout:g} s",
                "allow more time with --timeout",
            ) from error
        except (ssl.SSLError, http.client.BadStatusLine) as error:
            if isinstance(error, ssl.SSLCertVerificationError | ConnectionError):
                raise self._unreachable(error) from error
            scheme = "HTTPS" if self._secure else "HTTP"
            raise CanvasError(
                f"the server at {self.url} does not speak {scheme}",
                "give the OpenAI API's address with --url; begin it with http:// or https://, whichever the server uses",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # not OpenAI's form
            raise CanvasError(f"the server at {self.url} has no OpenAI API", PORT_HINT) from error
        finally:
            connection.close()

    def _unreachable(self, error: Exception) -> CanvasError:
        why = str(error) or type(error).__name__
        return CanvasError(f"no OpenAI API answers at {self.url}: {why}", _START)

    def _refused(self, message: str) -> CanvasError:
        hint = f"set {KEY_VARIABLE} to one of the server's keys" if "API key" in message else ""
        if message.startswith(
            "HTTP 404"
        ):  # the error is not in OpenAI's form, so this is another API
            hint = PORT_HINT
        return CanvasError(f"the server refused the request: {message}", hint)


def address(url: str | None) -> str:
    """Return a server's address with its scheme, port and path, which ends with `/v1`. Raises UsageError if the address
    is invalid."""
    scheme, host, port, path = _parts(url)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{path}"


def _parts(url: str | None) -> tuple[str, str, int, str]:
    given = url or f"127.0.0.1:{API_PORT}"
    scheme, host, port = ports.split_url(given, ("http", "https"), "give http://host:port/v1")
    # A gateway may serve the API under a longer path.
    path = urlsplit(given if "://" in given else f"//{given}").path.rstrip("/").removesuffix("/v1")
    return scheme, host, port or (443 if scheme == "https" else API_PORT), f"{path}/v1"


def _request(inputs: Mapping[str, Any], model: str) -> tuple[str, dict[str, Any]]:
    """Return the endpoint and the body of a request with these inputs."""
    options = {
        _NAMES.get(name, name): value
        for name, value in inputs.items()
        if value is not None and name not in ("prompt", "prompt_ids", "messages", "raw", "drafts")
    }
    if "canvas" in options:  # for Triton, this input is a JSON string
        options["canvas"] = json.loads(options["canvas"])
    body = {"model": model, **options}
    if "prompt_ids" in inputs:
        return "completions", {**body, "prompt": inputs["prompt_ids"]}
    if inputs.get("raw"):
        return "completions", {**body, "prompt": inputs["prompt"]}
    user = [{"role": "user", "content": inputs.get("prompt")}]
    messages = json.loads(inputs["messages"]) if "messages" in inputs else user
    return "chat/completions", {**body, "messages": messages}
