"""Errors in OpenAI's format, with the status that its clients expect."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

RETRY_AFTER = 2  # seconds, if nothing better is known


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

    def to_json(self) -> dict[str, Any]:
        """Return the body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """Return the whole reply."""
        return JSONResponse(self.to_json(), self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400: the request is wrong."""
    return ApiError(400, message, param=param, code=code)


def too_many(message: str) -> ApiError:
    """Return a 429: a limit was reached; the same request may succeed later."""
    headers = {"Retry-After": str(RETRY_AFTER)}
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def too_late(seconds: float) -> ApiError:
    """Return a 504: the request took longer than the operator allows."""
    message = f"The request took longer than {seconds:g} s: ask for fewer tokens or steps."
    return ApiError(504, message, code="request_timeout")


def unavailable(message: str, code: str, retry_after: int = RETRY_AFTER) -> ApiError:
    """Return a 503: the same request may succeed later."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after)})
