"""API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from canvasrt.containers.openai.errors import ApiError, bad_request, too_many
from canvasrt.runtime.prefix import ANYBODY


class Keys:
    """The accepted keys; without any, no caller needs one."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def check(self, authorization: str | None) -> str:
        """Return a name for the caller's key; empty if none is needed. ApiError 401 unless the
        header has one of the keys."""
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _refusal("You did not provide an API key: send Authorization: Bearer KEY.", None)
        # Headers are decoded as Latin-1, whatever their bytes.
        given = _digest(key.strip().encode("latin-1", "replace"))
        # Compare with every key; all digests have the same length.
        found = [hmac.compare_digest(given, known) for known in self._digests]
        if not any(found):
            raise _refusal("Incorrect API key provided.", "invalid_api_key")
        return given.hex()[:16]


def authorization(headers: Mapping[str, str]) -> str | None:
    """Return the header with a request's key; Anthropic's clients have another one for it."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (f"Bearer {key}" if key else None)


class Callers:
    """Counts the answers that each key is waiting for: at most `most` at once; None for any number.

    Without keys, callers cannot be told apart, and none is limited.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._count: dict[str, int] = defaultdict(int)

    @contextmanager
    def one(self, caller: str) -> Iterator[Callable[[int], None]]:
        """Count a request as one answer while the block runs, and yield a function that counts
        more.

        Both raise ApiError 429 if its caller has too many, 400 if the request alone has.
        """
        counted = 0
        most = self._most if caller else None

        def more(answers: int) -> None:
            nonlocal counted
            others = self._count[caller] - counted
            if most is not None and counted + answers > most:
                raise bad_request(
                    f"The request wants {counted + answers} answers; this server gives a key"
                    f" {most} at once.",
                    "n",
                    "invalid_value",
                )
            if most is not None and self._count[caller] + answers > most:
                raise too_many(
                    f"This key may wait for {most} answers at once, and waits for {others}."
                )
            self._count[caller] += answers
            counted += answers

        try:
            more(1)
            yield more
        finally:
            self._count[caller] -= counted
            if not self._count[caller]:
                del self._count[caller]


def name_of(caller: str) -> str:
    """Return the name of a key's caller for the models. Without keys, every request is a caller of its own."""
    return caller or ANYBODY + secrets.token_hex(8)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(message: str, code: str | None) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
