"""The OpenAPI document: built from the bodies that requests are checked with, and the replies' shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import canvasrt
from canvasrt.containers.openai.decisions import DecisionRequest, InfillRequest, SystemOneRequest
from canvasrt.containers.openai.responses import ResponsesRequest
from canvasrt.containers.openai.schema import ChatRequest, CompletionRequest
from canvasrt.containers.openai.tokenize import DetokenizeRequest, TokenizeRequest
from canvasrt.types import Json

_REF = "#/components/schemas/"
# What else an operation may answer. A server says 503 while it starts or stops.
_READ = {"401": "The API key is missing or wrong.", "403": "The Host is not one of this server's."}
_POST = {
    "400": "The request is wrong, or asks for what is not supported.",
    **_READ,
    "404": "The model is not served here.",
    "413": "The body is too large.",
    "415": "The body is not sent as JSON.",
    "429": "A limit of the operator is reached; try again later.",
    "500": "The model failed.",
    "503": "The server cannot answer now; try again later.",
    "504": "The request took longer than the operator allows.",
}
_OLLAMA = "Ollama's API."


@dataclass(frozen=True)
class Operation:
    """One operation: what it does, the model of its body, and the schema of its reply."""

    method: str
    path: str
    about: str
    reply: Json
    body: type[BaseModel] | Json | None = None
    streams: str = ""  # the media type of a streamed reply
    errors: Mapping[str, str] | None = None


def _object(required: Mapping[str, Any], **more: Any) -> Json:
    """Return the schema of an object with these properties; a string stands for a type."""
    given = {name: _schema(each) for name, each in {**required, **more}.items()}
    return {"type": "object", "properties": given, "required": list(required)}


def _schema(of: Any) -> Json:
    if isinstance(of, dict):
        return of
    if isinstance(of, list):
        return {"type": "array", "items": _schema(of[0]) if of else {}}
    return {"type": of.split(" or ")} if " or " in of else {"type": of}


_USAGE = _object(
    {
        "prompt_tokens": "integer",
        "completion_tokens": "integer",
        "total_tokens": "integer",
        "denoising_steps": "integer",
    }
)
_SCORES = [_object({"score": "number", "redone": "integer"})]
_OWN = _object({"seed": "integer"}, warnings=["string"])
_ANSWER = {"id": "string", "object": "string", "created": "integer", "model": "string"}
_ANSWER |= {"system_fingerprint": "string"}
_MODEL = _object(
    {
        "id": "string",
        "object": "string",
        "created": "integer",
        "owned_by": "string",
        "max_model_len": "integer or null",
    }
)
_HEALTH = _object({"object": "string", "message": "string", "status": "string"})
_ERROR = _object(
    {
        "error": _object(
            {
                "message": "string",
                "type": "string",
                "param": "string or null",
                "code": "string or null",
            }
        )
    }
)
_OLLAMA_ERROR = _object({"error": {}})
_MESSAGE = _object(
    {"role": "string", "content": "string or null"},
    reasoning_content="string",
    tool_calls=["object"],
)
_CHOICE = {"index": "integer", "finish_reason": "string", "logprobs": "object or null"}
_EVENTS, _LINES, _TEXT = "text/event-stream", "application/x-ndjson", "text/plain"
_OLLAMA_BODY = _object(
    {"model": "string"},
    stream="boolean",
    options="object",
    think={},
    keep_alive={},
)

# Fields that several bodies share.
_ABOUT = {
    "model": "A name under which the model is served.",
    "n": "How many answers; their seeds follow each other.",
    "seed": "Seed of the noise; the same seed gives the same answer.",
    "stop": "Strings that end the answer, which is cut before them.",
    "stream": "Send text as server-sent events, once it is final.",
    "max_tokens": "Most new tokens.",
    "max_completion_tokens": "Most new tokens.",
    "max_output_tokens": "Most new tokens.",
    "logit_bias": "Numbers to add to logits, by token id.",
    "canvas": "Tokens that positions of the answer begin with, hold, or may have.",
    "response_format": "What the answer must follow: a JSON schema, a regex or a grammar.",
    "messages": "The chat so far.",
    "tools": "Functions that the model may call.",
    "tool_choice": "Whether it may, must, or which one it must call.",
    "enable_thinking": "Whether the model thinks before it answers.",
    "image_tokens": "The most tokens of an image.",
    "questions": "Closed questions.",
    "samples": "Draws of noise, over which probabilities are averaged.",
    "steps": "Denoising steps per read.",
    "layout": "How questions are laid out: letters or bare.",
}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a chat.",
        _object(
            {
                **_ANSWER,
                "choices": [_object({**_CHOICE, "message": _MESSAGE}, block_scores=_SCORES)],
                "usage": _USAGE,
                "canvasrt": _OWN,
            }
        ),
        ChatRequest,
        _EVENTS,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue a prompt.",
        _object(
            {
                **_ANSWER,
                "choices": [_object({**_CHOICE, "text": "string"}, block_scores=_SCORES)],
                "usage": _USAGE,
                "canvasrt": _OWN,
            }
        ),
        CompletionRequest,
        _EVENTS,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer a conversation. Nothing is stored.",
        _object(
            {
                "id": "string",
                "object": "string",
                "status": "string",
                "model": "string",
                "output": ["object"],
                "usage": "object or null",
                "canvasrt": _object({"seed": "integer"}, warnings=["string"], block_scores=_SCORES),
            }
        ),
        ResponsesRequest,
        _EVENTS,
    ),
    Operation(
        "post",
        "/v1/decisions",
        "Answer closed questions with probabilities.",
        _object({"model": "string", "answers": ["object"], "usage": "object"}),
        DecisionRequest,
    ),
    Operation(
        "post",
        "/v1/systemone",
        "Answer closed questions, in System One's shape.",
        _object({"model": "string", "answers": "object", "usage": "object"}),
        SystemOneRequest,
    ),
    Operation(
        "post",
        "/v1/infill",
        "Fill the gaps of a text.",
        _object(
            {
                "model": "string",
                "text": "string",
                "gaps": ["string"],
                "logprob": "number",
                "usage": _USAGE,
                "canvasrt": _OWN,
            }
        ),
        InfillRequest,
    ),
    Operation(
        "post",
        "/tokenize",
        "Return the tokens of a prompt or a chat.",
        _object(
            {
                "count": "integer",
                "max_model_len": "integer or null",
                "tokens": ["integer"],
                "token_strs": "array or null",
            }
        ),
        TokenizeRequest,
    ),
    Operation(
        "post",
        "/detokenize",
        "Return the text of tokens.",
        _object({"prompt": "string"}),
        DetokenizeRequest,
    ),
    Operation("post", "/api/chat", _OLLAMA, _object({"model": "string"}), _OLLAMA_BODY, _LINES),
    Operation("post", "/api/generate", _OLLAMA, _object({"model": "string"}), _OLLAMA_BODY, _LINES),
    Operation("get", "/api/tags", _OLLAMA, _object({"models": ["object"]})),
    Operation("get", "/api/version", _OLLAMA, _object({"version": "string"})),
    Operation(
        "get", "/v1/models", "List the models.", _object({"object": "string", "data": [_MODEL]})
    ),
    Operation(
        "get",
        "/v1/models/{name}",
        "Describe a model.",
        _MODEL,
        errors={**_READ, "404": _POST["404"]},
    ),
    Operation(
        "get", "/v1/health/live", "Whether the process lives.", _HEALTH, errors={"503": "It ends."}
    ),
    Operation(
        "get",
        "/v1/health/ready",
        "Whether requests are answered.",
        _HEALTH,
        errors={"503": _POST["503"]},
    ),
    Operation(
        "get",
        "/v1/version",
        "The release, and the version of this API.",
        _object({"release": "string", "api": "string"}),
    ),
    Operation("get", "/v1/metadata", "What is served.", _object({"id": "string"})),
    Operation(
        "get",
        "/v1/license",
        "The license of this server.",
        _object({"name": "string", "url": "string", "content": "string"}),
    ),
    Operation("get", "/v1/metrics", "Metrics, in Prometheus' format.", {"type": "string"}),
    Operation("get", "/openapi.json", "This document.", _object({"openapi": "string"})),
)


def document(needs_key: bool) -> Json:
    """Return the document of one server."""
    bodies = [each.body for each in OPERATIONS if isinstance(each.body, type)]
    _, defined = models_json_schema(
        [(each, "validation") for each in bodies], ref_template=_REF + "{model}"
    )
    paths: dict[str, Json] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each, needs_key)
    for schema in defined["$defs"].values():
        for name, about in _ABOUT.items():
            if name in schema.get("properties", {}):
                schema["properties"][name].setdefault("description", about)
    schemas = {**defined["$defs"], "Error": _ERROR, "OllamaError": _OLLAMA_ERROR}
    components: Json = {"schemas": schemas}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "canvasrt",
            "version": canvasrt.__version__,
            "description": "Text, decisions and infilling by a diffusion model.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": components,
    }


def _operation(each: Operation, needs_key: bool) -> Json:
    ollama = each.path.startswith("/api/")
    error = _json({"$ref": _REF + ("OllamaError" if ollama else "Error")})
    content = {_TEXT: {"schema": each.reply}} if each.reply["type"] == "string" else None
    content = content or _json(each.reply)
    if each.streams:
        content[each.streams] = {"schema": {"type": "string"}}
    errors = each.errors or (_POST if each.method == "post" else {"403": _READ["403"]})
    if each.path in ("/v1/models", "/api/tags"):
        errors = _READ
    found: Json = {
        "summary": each.about,
        "operationId": f"{each.method}{each.path.translate(_NAME)}",
        "responses": {"200": {"description": "The answer.", "content": content}},
    }
    for status, about in errors.items():
        found["responses"][status] = {"description": about, "content": error}
    if each.body is not None:
        schema = {"$ref": _REF + each.body.__name__} if isinstance(each.body, type) else each.body
        found["requestBody"] = {"required": True, "content": _json(schema)}
    if "{name}" in each.path:
        where = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        found["parameters"] = [where]
    if needs_key and "401" in errors:
        found["security"] = [{"key": []}]
    return found


_NAME = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def fields(schema: Json, schemas: Mapping[str, Json]) -> Sequence[tuple[str, str, bool, str]]:
    """Return a body's fields, required ones first: name, type, whether it is required, and what it
    is."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].removeprefix(_REF)]
    required = schema.get("required", ())
    found = [
        (name, shown(each, schemas), name in required, _about(each))
        for name, each in schema.get("properties", {}).items()
    ]
    return sorted(found, key=lambda each: not each[2])


def _about(schema: Json) -> str:
    inside = (each.get("description", "") for each in schema.get("anyOf", ()))
    return str(schema.get("description") or next(filter(None, inside), ""))


def shown(schema: Json, schemas: Mapping[str, Json]) -> str:
    """Return a schema's type in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].removeprefix(_REF).strip("_"))
    if "enum" in schema:
        return " or ".join("null" if each is None else repr(each) for each in schema["enum"])
    if "anyOf" in schema:
        kinds = [shown(each, schemas) for each in schema["anyOf"]]
        return " or ".join(kind for kind in dict.fromkeys(kinds) if kind != "null")
    if "const" in schema:
        return repr(schema["const"])
    if schema.get("type") == "array":
        return f"list of {shown(schema.get('items', {}), schemas)}"
    kind = schema.get("type", "any")
    text = " or ".join(kind) if isinstance(kind, list) else str(kind)
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{text} from {low} to {high}"
    if "exclusiveMinimum" in schema:
        return f"{text} above {schema['exclusiveMinimum']}"
    return f"{text} of at least {low}" if low is not None else text
