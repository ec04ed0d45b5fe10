"""Files of requests for `canvasrt batch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from canvasrt.containers.batch.journal import Outputs

_TINY = {"max_tokens": 6, "max_denoising_steps": 2}


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    """Return a request to an endpoint."""
    body = {"model": "canvasrt", **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(
    custom_id: str, url: str = "/v1/chat/completions", content: str = "12+34=", **body: Any
) -> dict[str, Any]:
    """Return a request for a short chat."""
    messages = [{"role": "user", "content": content}]
    return line(custom_id, url, **{"messages": messages, **_TINY, **body})


def write(folder: Path, *lines: dict[str, Any] | str) -> Path:
    """Write a file of requests. Lines that are strings are written as they are."""
    file = folder / "questions.jsonl"
    texts = (each if isinstance(each, str) else json.dumps(each) for each in lines)
    file.write_text("".join(f"{each}\n" for each in texts))
    return file


def count_done(outputs: Outputs) -> int:
    """Return how many requests the journal contains."""
    try:
        return max(0, outputs.journal.read_bytes().count(b"\n") - 1)
    except FileNotFoundError:  # not begun yet, or finished
        return 0
