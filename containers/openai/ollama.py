"""Ollama's `/api/chat`, `/api/generate`, `/api/tags` and `/api/version`, over the same answers."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import canvasrt
from canvasrt.containers.client.triton import StreamEvent
from canvasrt.containers.openai.aside import Aside
from canvasrt.containers.openai.auth import Keys
from canvasrt.containers.openai.completions import Completions, Run, streamed
from canvasrt.containers.openai.disconnect import unless_disconnected
from canvasrt.containers.openai.errors import ApiError, bad_request
from canvasrt.containers.openai.event_stream import EventStream
from canvasrt.containers.openai.parse_answer import AnswerReader, Piece
from canvasrt.containers.openai.part_limits import check_parts
from canvasrt.containers.openai.schema import (
    LEFT_OUT,
    ChatRequest,
    CompletionRequest,
    body_error,
    note,
)
from canvasrt.containers.untrusted import load_json
from canvasrt.errors import CanvasError

# Ollama's options → the fields of a chat. Those without a meaning here cannot change an answer.
_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_IGNORED = ("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap")
Read = Callable[[dict[str, Any], "list[str] | None"], ChatRequest | CompletionRequest]
_FIELDS = ("model", "stream", "options", "keep_alive", "think")


class ChatRoutes(Protocol):
    """What the routes need of the front end."""

    @property
    def models(self) -> tuple[str, ...]: ...

    @property
    def lenient(self) -> bool: ...

    keys: Keys

    def admit(self, request: Request) -> Completions: ...

    aside: Aside


class _Lines(EventStream):
    media_type = "application/x-ndjson"


def add_ollama(app: FastAPI, front: ChatRoutes) -> None:
    """Add the routes."""

    @app.post("/api/chat")
    async def chat(request: Request) -> Response:
        return await _guarded(lambda: _reply(front, request, _chat))

    @app.post("/api/generate")
    async def generate(request: Request) -> Response:
        return await _guarded(lambda: _reply(front, request, _generate))

    @app.get("/api/tags")
    async def tags(request: Request) -> Response:
        front.keys.check(request.headers.get("authorization"))
        models = [{"name": name, "model": name, "details": {}} for name in front.models]
        return JSONResponse({"models": models})

    @app.get("/api/version")
    async def version() -> Response:
        return JSONResponse({"version": canvasrt.__version__})


async def _guarded(reply: Callable[[], Any]) -> Response:
    """Return a reply, with errors in Ollama's form."""
    try:
        response: Response = await reply()
    except ApiError as error:
        return JSONResponse({"error": error.message}, error.status, error.headers)
    return response


async def _reply(
    front: ChatRoutes,
    request: Request,
    read: Read,
) -> Response:
    completions = front.admit(request)
    raw = await request.body()
    body, generation = await front.aside.run(len(raw), _parsed, front, read, raw)
    run = await completions.start(request, generation)
    answer = _Answer(body, run, request.url.path, generation.ignored)
    if body.get("stream", True):
        return await streamed(request, answer.lines(), _Lines)
    return JSONResponse(await unless_disconnected(request.receive, answer.whole()))


def _parsed(
    front: ChatRoutes, read: Read, raw: bytes
) -> tuple[dict[str, Any], ChatRequest | CompletionRequest]:
    """Return a body, and the request in it."""
    body = _body(raw)
    name = str(body.get("model", "")).removesuffix(":latest")
    if name not in front.models:
        raise ApiError(404, f"model {body.get('model')!r} not found", param="model")
    ignored: list[str] | None = [] if front.lenient else None
    return body, _generation(read, {**body, "model": name}, ignored)


def _generation(
    read: Read, body: dict[str, Any], ignored: list[str] | None
) -> ChatRequest | CompletionRequest:
    """Return the request in a body; with `ignored`, without the options that are not supported."""
    try:
        generation = read(body, ignored)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        names = {str(each["loc"][-1]) for each in found}
        if ignored is None or any(each["type"] not in LEFT_OUT for each in found):
            raise body_error(error) from None
        kept = {k: v for k, v in body["options"].items() if _OPTIONS.get(k, k) not in names}
        for name in sorted(set(body["options"]) - set(kept)):
            note(ignored, f"options.{name} is not supported.")
        try:
            generation = read({**body, "options": kept}, ignored)
        except ValidationError as again:
            raise body_error(again) from None
    generation._ignored = ignored
    return generation


class _Answer:
    """One answer in Ollama's shape, which differs between chats and completions."""

    def __init__(
        self, body: dict[str, Any], run: Run, path: str, ignored: list[str] | None
    ) -> None:
        self._ignored = ignored
        self._model = body["model"]
        self._run = run
        self._chat = path.endswith("/chat")
        # A raw prompt is continued as it is, without thoughts and calls.
        self._reader: AnswerReader | None = None if body.get("raw") else run.reader()
        self._begin = time.perf_counter_ns()

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        final: StreamEvent | None = None
        try:
            async with self._run.answers() as answers:
                async for number, event in answers:
                    if event.event == "final":
                        final = event
                        self._run.count(number, event)
        except (ApiError, CanvasError) as error:
            raise self._run.named(error) from error
        assert final is not None
        return self._line(self._pieces(final.text, final=True)) | self._end(final)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the answer as lines of JSON. ApiError only before the first."""
        begun = False
        try:
            async with self._run.answers() as answers:
                async for number, event in answers:
                    if not begun:
                        begun = True
                        self._run.first_piece()
                    final = event.event == "final"
                    pieces = self._pieces("" if final else event.text, final)
                    if final:
                        self._run.count(number, event)
                        yield _encoded(self._line(pieces) | self._end(event))
                    elif pieces:
                        yield _encoded(self._line(pieces))
        except (ApiError, CanvasError) as error:
            failure = self._run.named(error)
            if not begun:
                raise failure from error
            yield _encoded({"error": failure.message})

    def _pieces(self, text: str, final: bool) -> list[Piece]:
        if self._reader is None:
            return [Piece("content", text)] if text else []
        return self._reader.put(text, final)

    def _line(self, pieces: list[Piece]) -> dict[str, Any]:
        said, thought = (
            "".join(piece.text for piece in pieces if piece.kind == kind)
            for kind in ("content", "reasoning")
        )
        calls = [
            {"function": {"name": each.call.name, "arguments": json.loads(each.call.arguments)}}
            for each in pieces
            if each.call is not None
        ]
        more = ({"thinking": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        line = {"model": self._model, "created_at": now, "done": False}
        if self._chat:
            return {**line, "message": {"role": "assistant", "content": said, **more}}
        return {**line, "response": said, **more}

    def _end(self, final: StreamEvent) -> dict[str, Any]:
        more = {"canvasrt": {"warnings": self._ignored}} if self._ignored else {}
        return {
            **more,
            "done": True,
            "done_reason": final.finish_reason,
            "total_duration": time.perf_counter_ns() - self._begin,
            "prompt_eval_count": len(final.prompt_token_ids),
            "eval_count": len(final.token_ids),
        }


def _chat(body: dict[str, Any], ignored: list[str] | None) -> ChatRequest:
    _known(body, ignored, "messages", "tools")
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise bad_request("messages must be a list of messages", "messages")
    check_parts(messages, "messages")
    fields = _shared(body) | {"messages": _messages(messages)}
    if body.get("tools"):
        fields["tools"] = body["tools"]
    return ChatRequest.model_validate(fields)


def _generate(body: dict[str, Any], ignored: list[str] | None) -> ChatRequest | CompletionRequest:
    _known(body, ignored, "prompt", "system", "images", "raw")
    prompt = body.get("prompt") or ""
    if body.get("raw"):
        return CompletionRequest.model_validate(_shared(body) | {"prompt": prompt})
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    check_parts([{"images": body.get("images")}], "images")
    user = {"role": "user", "content": prompt, "images": body.get("images")}
    return ChatRequest.model_validate(_shared(body) | {"messages": _messages([*system, user])})


def _shared(body: dict[str, Any]) -> dict[str, Any]:
    options = body.get("options") or {}
    if not isinstance(options, dict):
        raise bad_request("options must be an object", "options")
    fields: dict[str, Any] = {
        _OPTIONS.get(str(name), str(name)): value
        for name, value in options.items()
        if name not in _IGNORED
    }
    most = fields.get("max_tokens")
    if isinstance(most, int) and most < 0:  # as many as there is room for
        del fields["max_tokens"]
    think = body.get("think")
    if isinstance(think, str):
        fields["reasoning_effort"] = think
    elif think is not None and not body.get("raw"):
        fields["enable_thinking"] = think
    return {"model": body["model"], **fields}


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return OpenAI's messages. Ollama's calls have no ids: results answer them in order."""
    read, open_calls = [], iter(())
    for number, message in enumerate(messages):
        one = {k: v for k, v in message.items() if k in ("role", "content") and v is not None}
        if message.get("thinking"):
            one["reasoning_content"] = message["thinking"]
        for name in ("images", "tool_calls"):
            if not isinstance(message.get(name) or [], list):
                raise bad_request(f"messages[{number}].{name} is not a list", "messages")
        if message.get("images"):
            images = [{"type": "image_url", "image_url": {"url": u}} for u in message["images"]]
            # Models are trained on images that come before the text about them.
            one["content"] = [*images, {"type": "text", "text": message.get("content") or ""}]
        if message.get("tool_calls"):
            calls = [_call(each, f"{number}.{i}") for i, each in enumerate(message["tool_calls"])]
            one["tool_calls"], open_calls = calls, iter([each["id"] for each in calls])
        if message.get("role") == "tool":
            one["tool_call_id"] = next(open_calls, "unknown")
            if message.get("tool_name"):
                one["name"] = message["tool_name"]
        read.append(one)
    return read


def _call(call: Any, id: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise bad_request("a tool call has no function", "messages")
    arguments = json.dumps(function.get("arguments") or {})
    return {
        "id": id,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _known(body: dict[str, Any], ignored: list[str] | None, *names: str) -> None:
    """Raise ApiError for a field that is not supported and would change the answer, or note it in
    `ignored`."""
    for name, value in body.items():
        if name not in (*_FIELDS, *names) and value not in (None, "", [], {}):
            error = bad_request(f"{name} is not supported.", name, "unsupported_parameter")
            if ignored is None:
                raise error
            note(ignored, error.message)


def _body(data: bytes) -> dict[str, Any]:
    try:
        body = load_json(data)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    return body


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"
