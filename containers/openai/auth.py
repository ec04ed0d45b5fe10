"""Checks API keys in constant time, and limits how many unfinished answers each key can have."""

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
    """The accepted API keys. If there are none, callers need no key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def check(self, headers: Mapping[str, str]) -> str:
        """Return a name that identifies the caller's key; the name is empty if no key is needed.

        Raises ApiError 401 if the headers have no accepted key. Anthropic's clients send the key in x-api-key.
        """
        if not self._digests:
            return ""
        given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
        scheme, _, key = given.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _refusal("You did not provide an API key: send Authorization: Bearer KEY.", None)
        # Latin-1 restores the header's original bytes.
        digest = _digest(key.strip().encode("latin-1", "replace"))
        # In constant time, because every key is compared and all digests have the same length.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(found):
            raise _refusal("Incorrect API key provided.", "invalid_api_key")
        return digest.hex()[:16]


class Callers:
    """Limits how many unfinished answers each API key can have. If `most` is None, there is no limit.

    Callers without a key cannot be distinguished, so they are not limited.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._count: dict[str, int] = defaultdict(int)

    @contextmanager
    def one(self, caller: str) -> Iterator[Callable[[int], None]]:
        """Inside the `with` block, a request counts as one answer. Yields a function that counts more answers.

        Both entering the block and calling the function can raise ApiError: 400 if this request alone exceeds the
        limit, 429 if all of the caller's requests together exceed it.
        """
        counted = 0
        most = self._most if caller else None

        def more(answers: int) -> None:
            nonlocal counted
            others = self._count[caller] - counted
            if most is not None and counted + answers > most:
                raise bad_request(
                    f"The request asks for {counted + answers} answers; this server allows"
                    f" {most} at once per key.",
                    "n",
                    "invalid_value",
                )
            if most is not None and self._count[caller] + answers > most:
                raise too_many(
                    f"This key may wait for {most} answers at once; it already waits for {others}."
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
    """Return the name by which the models tell callers apart. Without a key, every request counts as a different
    caller."""
    return caller or ANYBODY + secrets.token_hex(8)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(message: str, code: str | None) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
