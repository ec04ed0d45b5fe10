"""Errors in OpenAI's format, with the statuses that its clients expect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse
from typing_extensions import TypedDict

RETRY_AFTER = 2  # default number of seconds until a retry


class ErrorDetails(TypedDict):
    """The error's message, type, parameter and code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """The body of a reply with an error."""

    error: ErrorDetails


class AnthropicDetails(TypedDict):
    """The error's type and message, in Anthropic's form."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """The body of an error in Anthropic's form."""

    type: str
    error: AnthropicDetails


# Anthropic's names for the kinds of errors, by status.
_ANTHROPICS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error reply. `param` names the parameter that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def type(self) -> str:
        """OpenAI's name for the kind of error."""
        if self.status == 503:
            return "service_unavailable"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def to_json(self) -> ErrorReply:
        """Return the reply's body, in OpenAI's form."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, path: str = "") -> JSONResponse:
        """Return the HTTP response, in the form of the API that `path` belongs to."""
        body: Any = self.to_json()
        if path.startswith("/api/"):  # Ollama's errors are strings
            body = {"error": self.message}
        elif path.startswith("/v1/messages"):
            body = in_anthropics_form(self)
        return JSONResponse(body, self.status, self.headers)


def in_anthropics_form(error: ApiError) -> AnthropicError:
    """Return the body of an error in Anthropic's form.

    If the context is too short, the message begins like Anthropic's. Claude Code recognizes this beginning, and then
    asks for fewer tokens or compacts the conversation.
    """
    kind, begin = "api_error" if error.status >= 500 else "invalid_request_error", ""
    if error.code == "context_length_exceeded":
        fewer = re.search(r"of (\d+) tokens and (\d+) .* of (\d+) tokens: .*ask for", error.message)
        begin = "input length and `max_tokens` exceed context limit: {} + {} > {}. "
        begin = begin.format(*fewer.groups()) if fewer else "prompt is too long: "
    details = {"type": _ANTHROPICS.get(error.status, kind), "message": begin + error.message}
    return {"type": "error", "error": AnthropicDetails(**details)}  # type: ignore[typeddict-item]


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400: the request is wrong."""
    return ApiError(400, message, param=param, code=code)


def unknown_model(name: str, served: Iterable[str]) -> ApiError:
    """Return the 404 for a model that is not served here."""
    return ApiError(
        404,
        f"The model {name!r} does not exist; this server serves {', '.join(served)}.",
        param="model",
        code="model_not_found",
    )


def too_many(message: str) -> ApiError:
    """Return a 429: a limit was reached. The same request can succeed later."""
    headers = {"Retry-After": str(RETRY_AFTER)}
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def too_late(seconds: float) -> ApiError:
    """Return a 504: the request took longer than the operator allows."""
    message = f"The request took longer than {seconds:g} s: ask for fewer tokens or steps."
    return ApiError(504, message, code="request_timeout")


def unavailable(message: str, code: str, retry_after: int = RETRY_AFTER) -> ApiError:
    """Return a 503: the same request can succeed later."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after)})


def from_validation(error: ValidationError) -> ApiError:
    """Return the error for a body that fails validation."""
    found = error.errors(include_url=False, include_context=False)[0]
    kind, message = found["type"], found["msg"]
    param = path_of(found["loc"]) or None
    if kind == "json_invalid":
        why = message.removeprefix("Invalid JSON: ")
        return bad_request(f"The body of the request is not JSON: {why}.", None, "invalid_json")
    if kind == "extra_forbidden":
        return bad_request(f"Unknown parameter: {param!r}.", param, "unknown_parameter")
    if kind == "missing":
        return bad_request(
            f"Missing required parameter: {param!r}.", param, "missing_required_parameter"
        )
    if kind == "invalid_type":  # raised by a field's validator
        return bad_request(message, param, kind)
    if param is None:
        return bad_request("The body of the request must be a JSON object.", None, "invalid_type")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return bad_request(f"Invalid {param!r}: {message}.", param, code)


def rename(error: ApiError, names: Mapping[str, str]) -> bool:
    """Replace our parameter names in an error with those of the request's API; return whether there were any. `names`
    maps patterns of our names to the API's names. A pattern applies only if it matches `param`, because many names are
    also ordinary words."""
    found = False
    for pattern, own in names.items():
        if error.param and re.search(pattern, error.param):
            found, own = True, own.replace("\\", r"\\")
            error.param = re.sub(pattern, own, error.param)
            error.message = re.sub(pattern, own, error.message)
    return found


def leading(name: str) -> str:
    """Return a pattern that matches the path of the parameter `name`, but only at the beginning of a text, because
    elsewhere `name` is an ordinary word. The case is ignored, because sentences begin with a capital letter."""
    return rf"^(?i:{re.escape(name)})\b[\w.\[\]]*"


def path_of(loc: tuple[int | str, ...]) -> str:
    """Return a field's path, such as `stop[1]` for `("stop", 1)`, without pydantic's names of validators."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.replace("_", "").isalnum():
            path += f".{part}" if path else part
    return path
