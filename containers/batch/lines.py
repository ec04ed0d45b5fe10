"""The lines of a batch's input, checked before any work begins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from canvasrt.containers.untrusted import load_json
from canvasrt.errors import CanvasError

# Endpoints that a batch can call → whether the endpoint draws a random seed if the body has none.
URLS = {
    "/v1/chat/completions": True,
    "/v1/completions": True,
    "/v1/responses": True,
    "/v1/infill": True,
    "/v1/decisions": False,
    "/v1/systemone": False,
}
# Request fields that form the prompt, in the order in which the prompt contains them.
_PROMPT = ("tools", "instructions", "messages", "prompt", "input", "state", "text")
_SEEDS = 2**31  # some servers read seeds as signed 32-bit numbers


@dataclass(frozen=True)
class Line:
    """One request. `body` is the JSON to send, with a seed if the endpoint would draw one."""

    number: int  # line number, from 1
    custom_id: str
    url: str
    body: bytes

    @property
    def key(self) -> str:
        """24 hexadecimal digits derived from `custom_id`, for reproducible ids."""
        return hashlib.sha256(self.custom_id.encode()).hexdigest()[:24]

    @property
    def request_id(self) -> str:
        """The request's id in the server's log."""
        return f"req_{self.key}"

    @property
    def beginning(self) -> tuple[str, str]:
        """A sort key that places prompts with the same prefix next to each other."""
        body = json.loads(self.body)
        return self.url, json.dumps([body.get(name) for name in _PROMPT], ensure_ascii=False)


class Lines(NamedTuple):
    """All lines of an input, and the SHA-256 of its file."""

    lines: list[Line]
    digest: str


def read_lines(file: Path, seed: int) -> Lines:
    """Return the requests of a file. A line without a seed gets one, derived from `seed` and the custom_id.

    Skips empty lines. If a line is invalid, raises CanvasError with its line number.
    """
    data = file.read_bytes()
    found: list[Line] = []
    numbers: dict[str, int] = {}
    for number, text in enumerate(data.split(b"\n"), 1):
        if not text.strip():
            continue
        line = _line(f"{file}, line {number}", number, text, seed)
        if (before := numbers.setdefault(line.custom_id, number)) != number:
            raise CanvasError(
                f"{file}, line {number} has the same custom_id as line {before}: {line.custom_id!r}",
                "give every line a different custom_id",
            )
        found.append(line)
    if not found:
        raise CanvasError(f"{file} has no requests", "give a JSONL file with one request per line")
    return Lines(found, hashlib.sha256(data).hexdigest())


def _line(where: str, number: int, text: bytes, seed: int) -> Line:
    given = _parsed(where, text)
    custom_id, url, body = given.get("custom_id"), given.get("url"), given.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise CanvasError(
            f"{where} has no custom_id", "give every line a unique custom_id, as a string"
        )
    if (method := given.get("method")) != "POST":
        raise CanvasError(f"{where}: method is {method!r}", "give POST")
    if url not in tuple(URLS):  # a tuple, because `url` may be unhashable
        raise CanvasError(f"{where}: url is {url!r}", f"give one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise CanvasError(f"{where}: body is not an object", "give the request's JSON object")
    if body.get("stream"):
        raise CanvasError(
            f"{where}: body.stream is set", "leave it out: a batch does not stream answers"
        )
    if URLS[url] and body.get("seed") in (None, -1):
        body = {**body, "seed": _seed(seed, custom_id)}
    return Line(number, custom_id, url, json.dumps(body).encode())


def _parsed(where: str, text: bytes) -> Mapping[str, Any]:
    try:
        given = load_json(text)
    except ValueError as error:
        raise CanvasError(
            f"{where} is not JSON: {error}", "give one JSON object per line"
        ) from None
    if not isinstance(given, dict):
        raise CanvasError(f"{where} is not an object", "give one JSON object per line")
    return given


def _seed(seed: int, custom_id: str) -> int:
    """Return a line's seed, which does not depend on its position in the file."""
    digest = hashlib.sha256(json.dumps([seed, custom_id]).encode()).digest()
    return int.from_bytes(digest[:8], "little") % _SEEDS
