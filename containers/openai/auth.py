"""API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from canvasrt.containers.openai.errors import ApiError


class Keys:
    """The accepted keys; without any, no caller needs one."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def check(self, authorization: str | None) -> None:
        """Raise ApiError 401 unless the header has one of the keys."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _refusal("You did not provide an API key: send Authorization: Bearer KEY.", None)
        # Headers are decoded as Latin-1, whatever their bytes.
        given = _digest(key.strip().encode("latin-1", "replace"))
        # Compare with every key; all digests have the same length.
        found = [hmac.compare_digest(given, known) for known in self._digests]
        if not any(found):
            raise _refusal("Incorrect API key provided.", "invalid_api_key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(message: str, code: str | None) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
